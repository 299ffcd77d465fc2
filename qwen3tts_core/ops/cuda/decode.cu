// Decode-step kernels for few rows in bfloat16: linear layers and paged attention.
//
// All follow one plan: what the kernel just before doesn't write (weights, the cached keys and
// values) is loaded into registers first, then the kernel waits for its inputs (programmatic
// dependent launch), so that the memory streams while the kernel before still runs. Attention reads
// the cache ahead of its wait, so whatever runs just before it lets it start only after a wait of
// its own: then all that came before is complete. A linear layer reads only weights ahead of its
// wait and may start at any time.
//
// Instantiated by name from nvrtc.py; no headers, so that it compiles at run time without a toolkit.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct alignas(16) Vec8 { u32 v[4]; };  // eight bfloat16

__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_inputs() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Weights: read once, never written while the server runs.
__device__ __forceinline__ Vec8 load_weights(const void* p) {
  Vec8 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
  return r;
}
// Whatever kernels of this graph write: from L2, since L1 may hold what was there before.
__device__ __forceinline__ Vec8 load_fresh(const u16* p) {
  Vec8 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
  return r;
}
// The same through L1, for what several blocks of a multiprocessor read. Only after the wait, which
// makes earlier kernels' writes visible, and never at addresses that were read ahead of it.
__device__ __forceinline__ Vec8 load_shared_by_blocks(const u16* p) {
  Vec8 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ u32 load_fresh_u32(const u16* p) {
  u32 r;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
struct alignas(8) Vec4 { u32 v[2]; };  // four bfloat16
__device__ __forceinline__ Vec4 load_fresh_vec4(const u16* p) {
  Vec4 r;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "l"(p) : "memory");
  return r;
}
// Sixteen bytes from L2 to shared memory while this thread goes on, or zeros.
__device__ __forceinline__ void copy_or_zero(u16* to, const u16* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(copies ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ i64 load_fresh_i64(const i64* p) {
  i64 r;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ float load_fresh_f32(const float* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ float low_f32(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_f32(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float round_bf16(float x) { return low_f32(pack_bf16(x, 0.0f)); }
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Four e4m3 to two pairs of bfloat16, exactly: the bits move to where bfloat16 has them, which is the
// value times 2^-120 (e4m3's exponents are biased by 7, bfloat16's by 127; subnormals fit as well).
struct Pairs { u32 low, high; };
__device__ __forceinline__ u32 bf16x2_of_high_bytes(u32 two) {
  return mul_bf16x2((two & 0x80008000u) | ((two >> 4) & 0x07f007f0u), 0x7b807b80u);  // by 2^120
}
__device__ __forceinline__ Pairs unpack_e4m3(u32 four) {
  return {bf16x2_of_high_bytes(__byte_perm(four, 0, 0x1404)), bf16x2_of_high_bytes(__byte_perm(four, 0, 0x3424))};
}
__device__ __forceinline__ float bf16_at(const u16* p) { return __uint_as_float(((u32)*p) << 16); }

// D[16 x 8] += A[16 x 16] B[16 x 8]. Which k each thread holds doesn't matter, as long as A and B
// agree: here every thread holds consecutive ones, so that all loads are 16 bytes.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ------------------------------------------------------------------------------------ linear
// out[m, n] = sum_k x[m, k] w[n, k], for m < num_rows <= 8 NT gridDim.y.
//   NORM: x is RMS-normed. Its gain is in w already; its scale, one number per row, comes at the end.
//   GATED: w holds gate rows, then up rows; out = silu(gate) up.
//   RESIDUAL: out += residual.
//   E4M3: w holds one byte a value, to be multiplied by its row's scale; else bfloat16, scales is null.
//         16 bytes are then 16 k, two chunks' worth, which thread t of a row's four takes for itself.
// A block owns 16 MT weight rows; its W warps share K. Weight rows are mma's 16, batch rows its 8.
// PRE: 16 bytes a thread and weight row that are loaded before the wait, which is a chunk of 32 k or two.
// AHEAD: chunks of x that a warp has in flight after the wait. BLOCKS: wanted per multiprocessor.
template <int K, int W, int MT, int NT, int PRE, int AHEAD, int BLOCKS, bool NORM, bool GATED, bool RESIDUAL,
          bool E4M3>
__global__ void __launch_bounds__(W * 32, BLOCKS)
linear_kernel(const u16* __restrict__ x, const unsigned char* __restrict__ w, const float* __restrict__ scales,
              const u16* __restrict__ residual, u16* __restrict__ out, int num_rows, int n_out, float eps) {
  const int rows_before = blockIdx.y * NT * 8;
  x += (i64)rows_before * K;
  residual += (i64)rows_before * n_out;
  out += (i64)rows_before * n_out;
  num_rows -= rows_before;
  constexpr int CHUNKS = K / 32 / W;
  static_assert(CHUNKS * 32 * W == K, "K must split evenly over the warps");
  constexpr int PER_LOAD = E4M3 ? 2 : 1, LOADS = CHUNKS / PER_LOAD;  // chunks in 16 bytes
  static_assert(LOADS * PER_LOAD == CHUNKS, "a warp takes whole loads");
  constexpr int EARLY = PRE < LOADS ? PRE : LOADS;
  constexpr int FLIGHT = AHEAD < CHUNKS ? AHEAD : CHUNKS;
  constexpr int OUT_ROWS = GATED ? 8 * MT : 16 * MT;
  constexpr int OUTPUTS = NT * 8 * OUT_ROWS;
  constexpr int TURNS = (OUTPUTS + W * 32 - 1) / (W * 32);
  __shared__ float partial[W][NT * 8][16 * MT + 1];
  __shared__ float squares[W][NT * 8];

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int k0 = warp * (CHUNKS * 32) + t * 8 * PER_LOAD;
  auto k_of = [&](int c) { return k0 + c / PER_LOAD * (32 * PER_LOAD) + c % PER_LOAD * 8; };
  const int first_row = blockIdx.x * OUT_ROWS;

  constexpr int BYTES = E4M3 ? 1 : 2;
  const unsigned char* rows[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const i64 r = first_row + (GATED ? m * 8 : m * 16) + g;
    rows[m][0] = w + (r * K + k0) * BYTES;
    rows[m][1] = w + ((GATED ? r + n_out : r + 8) * K + k0) * BYTES;
  }
  Vec8 a[LOADS][MT][2], b[CHUNKS][NT];
  auto load_a = [&](int l) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      a[l][m][0] = load_weights(rows[m][0] + l * 64);
      a[l][m][1] = load_weights(rows[m][1] + l * 64);
    }
  };
  auto load_b = [&](int c) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int row = n * 8 + g;
      b[c][n] = Vec8{{0, 0, 0, 0}};
      if (row < num_rows) b[c][n] = load_shared_by_blocks(x + (i64)row * K + k_of(c));
    }
  };
#pragma unroll
  for (int l = 0; l < EARLY; ++l) load_a(l);
  constexpr bool BEFORE_ATTENTION = NORM && !GATED;  // the projection to q, k and v
  if (!BEFORE_ATTENTION) let_next_kernel_start();
  wait_for_inputs();
  if (BEFORE_ATTENTION) let_next_kernel_start();

#pragma unroll
  for (int c = 0; c < FLIGHT; ++c) load_b(c);
  u32 added[TURNS];
  if (RESIDUAL) {
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
      const int i = threadIdx.x + j * W * 32, row = i / OUT_ROWS;
      added[j] = 0;
      if (i < OUTPUTS && row < num_rows) {
        u16 one;
        asm volatile("ld.global.cg.u16 %0, [%1];"
                     : "=h"(one) : "l"(residual + (i64)row * n_out + first_row + i % OUT_ROWS) : "memory");
        added[j] = one;
      }
    }
  }
  float acc[MT][NT][4] = {};
  float square[NT] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c % PER_LOAD == 0 && c / PER_LOAD + EARLY < LOADS) load_a(c / PER_LOAD + EARLY);
    Vec8 weights[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec8& loaded = a[c / PER_LOAD][m][i];
        if (E4M3) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const Pairs pairs = unpack_e4m3(loaded.v[c % PER_LOAD * 2 + j]);
            weights[m][i].v[2 * j] = pairs.low;
            weights[m][i].v[2 * j + 1] = pairs.high;
          }
        } else {
          weights[m][i] = loaded;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (NORM) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float lo = low_f32(b[c][n].v[i]), hi = high_f32(b[c][n].v[i]);
          square[n] += lo * lo + hi * hi;
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const Vec8 &lo = weights[m][0], &hi = weights[m][1];
        mma(acc[m][n], lo.v[0], hi.v[0], lo.v[1], hi.v[1], b[c][n].v[0], b[c][n].v[1]);
        mma(acc[m][n], lo.v[2], hi.v[2], lo.v[3], hi.v[3], b[c][n].v[2], b[c][n].v[3]);
      }
    }
    if (c + FLIGHT < CHUNKS) load_b(c + FLIGHT);
  }

#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      partial[warp][n * 8 + 2 * t][m * 16 + g] = acc[m][n][0];
      partial[warp][n * 8 + 2 * t + 1][m * 16 + g] = acc[m][n][1];
      partial[warp][n * 8 + 2 * t][m * 16 + g + 8] = acc[m][n][2];
      partial[warp][n * 8 + 2 * t + 1][m * 16 + g + 8] = acc[m][n][3];
    }
    if (NORM) {
      float s = square[n];
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      if (t == 0) squares[warp][n * 8 + g] = s;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < TURNS; ++j) {
    const int i = threadIdx.x + j * W * 32, row = i / OUT_ROWS, r = i % OUT_ROWS;
    if (i >= OUTPUTS || row >= num_rows) continue;
    float scale = 1.0f;
    if (NORM) {
      float s = 0.0f;
#pragma unroll
      for (int k = 0; k < W; ++k) s += squares[k][row];
      scale = rsqrtf(s / K + eps);
    }
    const int at = GATED ? (r / 8) * 16 + r % 8 : r;
    float y = 0.0f;
#pragma unroll
    for (int k = 0; k < W; ++k) y += partial[k][row][at];
    y *= scale;
    if (E4M3) y *= scales[first_row + r];
    if (GATED) {
      float up = 0.0f;
#pragma unroll
      for (int k = 0; k < W; ++k) up += partial[k][row][at + 8];
      if (E4M3) up *= scales[first_row + r + n_out];
      y = y / (1.0f + __expf(-y)) * up * scale;
    }
    if (RESIDUAL) y += __uint_as_float(added[j] << 16);
    out[(i64)row * n_out + first_row + r] = (u16)(pack_bf16(y, 0.0f) & 0xffffu);
  }
}

// -------------------------------------------------------------------------------------- draw
// One row's code: penalty and exclusions (FIRST), temperature, top-k, top-p, Gumbel noise, arg max;
// then the row of `inputs` that the code feeds (FEED). As ops/sampling.py and ops/noise.py say, with
// thresholds found by bisection over the bits of the scores. A thread holds QUADS times four ids.
constexpr int DRAW_THREADS = 256;

struct BlockSums {  // one barrier a sum: consecutive sums use different places
  float (*places)[DRAW_THREADS / 32];
  int turn;
};
__device__ __forceinline__ float block_sum(BlockSums& b, float x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
  float* const place = b.places[b.turn];
  b.turn ^= 1;
  if ((threadIdx.x & 31) == 0) place[threadIdx.x >> 5] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DRAW_THREADS / 32; ++i) sum += place[i];
  return sum;
}
__device__ __forceinline__ int sortable(float x) {
  const int bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float gumbel(u32 word) {
  const float u = ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-07f;
  return -logf(-logf(u));
}

template <int QUADS, bool FIRST, bool FEED>
__global__ void __launch_bounds__(DRAW_THREADS)
draw_kernel(const u16* __restrict__ logits, const unsigned char* __restrict__ seen, const float* __restrict__ penalty,
            const unsigned char* __restrict__ forbid_eos, const unsigned char* __restrict__ allowed, int eos_id,
            const unsigned char* __restrict__ do_sample, const float* __restrict__ temperature,
            const i64* __restrict__ top_k, const float* __restrict__ tail_mass, const i64* __restrict__ seed,
            const i64* __restrict__ piece, const i64* __restrict__ frame, int group, const u16* __restrict__ inputs,
            i64* __restrict__ codes, u16* __restrict__ fed, int num_ids, int width) {
  constexpr int ITEMS = QUADS * 4;
  __shared__ float sums[2][DRAW_THREADS / 32];
  __shared__ unsigned long long best_of_warp[DRAW_THREADS / 32];
  BlockSums block{sums, 0};
  const int row = blockIdx.x;
  const float excluded = -__int_as_float(0x7f800000);

  // None of this is written by the kernel before: its noise is ready when the logits arrive.
  const float heat = temperature[row], tail = tail_mass[row];
  const int k = (int)top_k[row];
  float noise[ITEMS];
  if (do_sample[row]) {
    const i64 s = seed[row];
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
      u32 c0 = j * DRAW_THREADS + threadIdx.x, c1 = group, c2 = (u32)frame[row], c3 = (u32)piece[row];
      u32 k0 = (u32)s, k1 = (u32)(s >> 32);
#pragma unroll
      for (int i = 0; i < 10; ++i) {
        const u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      noise[4 * j] = gumbel(c0);
      noise[4 * j + 1] = gumbel(c1);
      noise[4 * j + 2] = gumbel(c2);
      noise[4 * j + 3] = gumbel(c3);
    }
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) noise[i] = 0.0f;
  }
  wait_for_inputs();
  let_next_kernel_start();

  float score[ITEMS];
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
    const int id = (j * DRAW_THREADS + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) score[4 * j + i] = excluded;
    if (id < num_ids) {  // num_ids is a multiple of 4
      const Vec4 four = load_fresh_vec4(logits + (i64)row * num_ids + id);
      score[4 * j] = low_f32(four.v[0]);
      score[4 * j + 1] = high_f32(four.v[0]);
      score[4 * j + 2] = low_f32(four.v[1]);
      score[4 * j + 3] = high_f32(four.v[1]);
      if (FIRST) {
        const float factor = penalty[row];
        const bool no_eos = forbid_eos[row];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = score[4 * j + i];
          if (seen[(i64)row * num_ids + id + i]) x = x < 0.0f ? x * factor : __fdiv_rn(x, factor);
          if (!allowed[id + i] || (no_eos && id + i == eos_id)) x = excluded;
        }
      }
    }
  }
  if (k > 0 && k < num_ids) {
    auto count_from = [&](int threshold) {
      int n = 0;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) n += sortable(score[i]) >= threshold;
      return (int)block_sum(block, (float)n);
    };
    // The order is the same before the temperature, where an untouched logit has 16 bits.
    constexpr int LOWEST_BIT = FIRST ? 0 : 16;
    int above = count_from(0);
    int threshold = above >= k ? 0 : (int)0x80000000;
    for (int bit = 30; bit >= LOWEST_BIT && above != k; --bit) {
      const int candidate = threshold + (1 << bit), n = count_from(candidate);
      if (n >= k) {
        threshold = candidate;
        above = n;
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) score[i] = sortable(score[i]) >= threshold ? score[i] : excluded;
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) score[i] = __fdiv_rn(score[i], heat);
  if (tail > 0.0f) {
    int top = (int)0x80000000;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) top = max(top, sortable(score[i]));
#pragma unroll
    for (int d = 16; d; d >>= 1) top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    if ((threadIdx.x & 31) == 0) best_of_warp[threadIdx.x >> 5] = (u32)top;
    __syncthreads();
    for (int i = 0; i < DRAW_THREADS / 32; ++i) top = max(top, (int)(u32)best_of_warp[i]);
    __syncthreads();
    const float peak = __int_as_float(top ^ ((top >> 31) & 0x7fffffff));
    float mass[ITEMS], own = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) own += mass[i] = __expf(score[i] - peak);
    const float inverse = 1.0f / block_sum(block, own);
    auto mass_to = [&](int threshold) {
      float m = 0.0f;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) m += sortable(score[i]) <= threshold ? mass[i] : 0.0f;
      return block_sum(block, m) * inverse;
    };
    int threshold = mass_to(-1) <= tail ? -1 : (int)0x80000000;
    for (int bit = 30; bit >= 0; --bit) {
      const int candidate = threshold + (1 << bit);
      if (candidate > threshold && mass_to(candidate) <= tail) threshold = candidate;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int key = sortable(score[i]);
      if (key <= threshold && key != top) score[i] = excluded;
    }
  }

  unsigned long long best = 0;
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 id = (j * DRAW_THREADS + threadIdx.x) * 4 + i;
      const u32 order = (u32)sortable(score[4 * j + i] + noise[4 * j + i]) ^ 0x80000000u;
      const unsigned long long key = (unsigned long long)order << 32 | (0xffffffffu - id);
      best = key > best ? key : best;
    }
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, d);
    best = other > best ? other : best;
  }
  if ((threadIdx.x & 31) == 0) best_of_warp[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < DRAW_THREADS / 32; ++i) best = best_of_warp[i] > best ? best_of_warp[i] : best;
  // A padding row may hold NaN, whose order is anybody's guess: stay inside the table.
  const u32 code = min(0xffffffffu - (u32)best, (u32)num_ids - 1);
  if (threadIdx.x == 0) codes[row] = code;
  if (FEED) {
    for (int i = threadIdx.x * 8; i < width; i += DRAW_THREADS * 8)
      *(Vec8*)(fed + (i64)row * width + i) = load_weights(inputs + (i64)code * width + i);
  }
}

// --------------------------------------------------------------------------------- attention
constexpr int E = 128, PAGE = 16, WARPS = 4, SPAN = 8, SPANS_AHEAD = 2;
constexpr float SCALE = 0.08838834764831845f;  // E ** -0.5

// What rotating one head needs, by one warp: lane holds elements 2l, 2l+1 of each half.
struct Rotation { float cos[2], sin[2], low_gain[2], high_gain[2]; };

__device__ __forceinline__ Rotation load_rotation(const u16* norm, const u16* cos, const u16* sin, int lane) {
  Rotation r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * lane + i;
    r.cos[i] = bf16_at(cos + j);
    r.sin[i] = bf16_at(sin + j);
    r.low_gain[i] = bf16_at(norm + j);
    r.high_gain[i] = bf16_at(norm + 64 + j);
  }
  return r;
}

// The scale that RMSNorm gives this row of a layer's input, for a projection that came without it
// (cuBLAS has no place for it); 1 where there is no such input. Each warp finds it on its own.
__device__ __forceinline__ float missing_scale(const u16* unscaled, i64 row, int width, float eps, int lane) {
  if (!unscaled) return 1.0f;
  float s = 0.0f;
#pragma unroll 8
  for (int i = lane * 8; i < width; i += 32 * 8) {
    const Vec8 x = load_shared_by_blocks(unscaled + row * width + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) s += low_f32(x.v[j]) * low_f32(x.v[j]) + high_f32(x.v[j]) * high_f32(x.v[j]);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
  return rsqrtf(s / width + eps);
}
__device__ __forceinline__ u32 scale_pair(u32 pair, float by) {
  return pack_bf16(low_f32(pair) * by, high_f32(pair) * by);
}

// Norm, round as the reference does, rotate. a, b: elements 2l, 2l+1 of the low and the high half,
// still to be multiplied by `missing`.
__device__ __forceinline__ void rotate(u32 a, u32 b, const Rotation& r, float missing, float eps, float (&low)[2],
                                       float (&high)[2]) {
  const float x[4] = {low_f32(a), high_f32(a), low_f32(b), high_f32(b)};
  float s = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
#pragma unroll
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
  const float scale = missing * rsqrtf(s * missing * missing / E + eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float lo = round_bf16(round_bf16(x[i] * scale) * r.low_gain[i]);
    const float hi = round_bf16(round_bf16(x[2 + i] * scale) * r.high_gain[i]);
    low[i] = round_bf16(lo * r.cos[i] - hi * r.sin[i]);
    high[i] = round_bf16(hi * r.cos[i] + lo * r.sin[i]);
  }
}

// The code predictor's attention: every row at the same `position` < 16 of its own page (page = row).
// One row, one KV head a block; one query head a warp. A pair of lanes takes a position for the
// scores; for the output a lane takes four of the head's values.
template <int GROUP>
__global__ void __launch_bounds__(GROUP * 32)
frame_attention_kernel(const u16* __restrict__ qkv, const u16* __restrict__ q_norm, const u16* __restrict__ k_norm,
                       const u16* __restrict__ cos, const u16* __restrict__ sin, u16* __restrict__ key,
                       u16* __restrict__ value, u16* __restrict__ out, int num_kv_heads, int position,
                       const u16* __restrict__ unscaled, int width, float eps) {
  __shared__ __align__(16) float q_shared[GROUP][E];
  __shared__ __align__(16) u16 own_key[GROUP][E];
  const int row = blockIdx.x, kv_head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int p = lane >> 1, side = lane & 1, heads = num_kv_heads * GROUP;
  const i64 stride = (i64)num_kv_heads * E;
  const i64 page = (i64)row * PAGE * stride + kv_head * E;

  Vec8 k[8];
  Vec4 v[PAGE];
  if (p < position) {
#pragma unroll
    for (int i = 0; i < 8; ++i) k[i] = load_fresh(key + page + p * stride + (i * 2 + side) * 8);
  }
#pragma unroll
  for (int i = 0; i < PAGE - 1; ++i) {
    if (i < position) v[i] = load_fresh_vec4(value + page + i * stride + lane * 4);
  }
  const Rotation q_rotation = load_rotation(q_norm, cos + position * 64, sin + position * 64, lane);
  const Rotation k_rotation = load_rotation(k_norm, cos + position * 64, sin + position * 64, lane);
  wait_for_inputs();
  let_next_kernel_start();

  const u16* const token = qkv + (i64)row * (heads + 2 * num_kv_heads) * E;
  const u16* const q_head = token + (kv_head * GROUP + warp) * E;
  const u16* const k_head = token + (heads + kv_head) * E;
  const u32 q_lo = load_fresh_u32(q_head + 2 * lane), q_hi = load_fresh_u32(q_head + 64 + 2 * lane);
  const u32 k_lo = load_fresh_u32(k_head + 2 * lane), k_hi = load_fresh_u32(k_head + 64 + 2 * lane);
  Vec4 new_v = load_fresh_vec4(k_head + (i64)num_kv_heads * E + lane * 4);
  const float missing = missing_scale(unscaled, row, width, eps, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) new_v.v[i] = scale_pair(new_v.v[i], missing);
  float low[2], high[2];
  rotate(q_lo, q_hi, q_rotation, missing, eps, low, high);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    q_shared[warp][2 * lane + i] = low[i] * SCALE;
    q_shared[warp][64 + 2 * lane + i] = high[i] * SCALE;
  }
  rotate(k_lo, k_hi, k_rotation, missing, eps, low, high);
  const u32 lo = pack_bf16(low[0], low[1]), hi = pack_bf16(high[0], high[1]);
  *(u32*)(&own_key[warp][2 * lane]) = lo;
  *(u32*)(&own_key[warp][64 + 2 * lane]) = hi;
  if (warp == 0) {
    u16* const at = key + page + position * stride;
    *(u32*)(at + 2 * lane) = lo;
    *(u32*)(at + 64 + 2 * lane) = hi;
    *(Vec4*)(value + page + position * stride + lane * 4) = new_v;
  }
  __syncwarp();
  if (p == position) {
#pragma unroll
    for (int i = 0; i < 8; ++i) k[i] = *(const Vec8*)(&own_key[warp][(i * 2 + side) * 8]);
  }
  float s = -1e30f;
  if (p <= position) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 q0 = *(const float4*)(&q_shared[warp][(i * 2 + side) * 8]);
      const float4 q1 = *(const float4*)(&q_shared[warp][(i * 2 + side) * 8 + 4]);
      sums[0] += q0.x * low_f32(k[i].v[0]) + q0.y * high_f32(k[i].v[0]);
      sums[1] += q0.z * low_f32(k[i].v[1]) + q0.w * high_f32(k[i].v[1]);
      sums[2] += q1.x * low_f32(k[i].v[2]) + q1.y * high_f32(k[i].v[2]);
      sums[3] += q1.z * low_f32(k[i].v[3]) + q1.w * high_f32(k[i].v[3]);
    }
    s = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  s += __shfl_xor_sync(0xffffffffu, s, 1);
  float peak = s;
#pragma unroll
  for (int d = 2; d <= 16; d <<= 1) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, d));
  const float weight = p <= position ? __expf(s - peak) : 0.0f;
  float total = weight;
#pragma unroll
  for (int d = 2; d <= 16; d <<= 1) total += __shfl_xor_sync(0xffffffffu, total, d);
  float acc[4] = {};
#pragma unroll
  for (int i = 0; i < PAGE; ++i) {
    const float at = __shfl_sync(0xffffffffu, weight, 2 * i);
    if (i <= position) {
      const Vec4 from = i == position ? new_v : v[i < PAGE - 1 ? i : 0];
      acc[0] += at * low_f32(from.v[0]);
      acc[1] += at * high_f32(from.v[0]);
      acc[2] += at * low_f32(from.v[1]);
      acc[3] += at * high_f32(from.v[1]);
    }
  }
  const float inverse = 1.0f / total;
  const Vec4 result = {{pack_bf16(acc[0] * inverse, acc[1] * inverse), pack_bf16(acc[2] * inverse, acc[3] * inverse)}};
  *(Vec4*)(out + ((i64)row * heads + kv_head * GROUP + warp) * E + lane * 4) = result;
}

// The talker's attention: one row, one KV head and its GROUP query heads, one split of the context.
// Pages of 16. A warp takes half a page at once: 16 lanes a position, 8 values a lane.
// FUSED: the new position's k and v are normed, rotated, written to the cache and attended to from
// here; otherwise the kernel before has put them into the cache (and pages are read after the wait).
// table_rows: a row's place in the page table, -1 for padding; or null.
template <int GROUP>
struct Running {  // an online softmax: peak, sum of weights, weighted values
  float peak[GROUP], total[GROUP], acc[GROUP][8];
};

// Take N positions at once; `visible` bit i says that position i counts.
template <int GROUP, int N>
__device__ __forceinline__ void attend(Running<GROUP>& r, const float (&q)[GROUP][8], const Vec8 (&k)[N],
                                       const Vec8 (&v)[N], u32 visible) {
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    float s[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        even += q[h][2 * j] * low_f32(k[i].v[j]);
        odd += q[h][2 * j + 1] * high_f32(k[i].v[j]);
      }
      s[i] = even + odd;
    }
#pragma unroll
    for (int d = 8; d; d >>= 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] += __shfl_xor_sync(0xffffffffu, s[i], d);
    }
    float peak = r.peak[h];
#pragma unroll
    for (int i = 0; i < N; ++i) peak = visible >> i & 1 ? fmaxf(peak, s[i]) : peak;
    const float shrink = __expf(r.peak[h] - peak);
    r.peak[h] = peak;
    r.total[h] *= shrink;
#pragma unroll
    for (int j = 0; j < 8; ++j) r.acc[h][j] *= shrink;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float weight = visible >> i & 1 ? __expf(s[i] - peak) : 0.0f;
      r.total[h] += weight;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        r.acc[h][2 * j] += weight * low_f32(v[i].v[j]);
        r.acc[h][2 * j + 1] += weight * high_f32(v[i].v[j]);
      }
    }
  }
}

template <int GROUP, bool FUSED>
__global__ void __launch_bounds__(WARPS * 32, 4)
attention_kernel(const u16* __restrict__ qkv, const u16* __restrict__ q_norm, const u16* __restrict__ k_norm,
                 const u16* __restrict__ cos, const u16* __restrict__ sin, const i64* __restrict__ positions,
                 const i64* __restrict__ write_index, const i64* __restrict__ page_table,
                 const i64* __restrict__ table_rows, u16* __restrict__ key, u16* __restrict__ value,
                 u16* __restrict__ out, float* __restrict__ partial, u32* __restrict__ arrived, int num_kv_heads,
                 int num_table_pages, int max_splits, const u16* __restrict__ unscaled, int width, float eps) {
  __shared__ float q_shared[GROUP][E];
  __shared__ __align__(16) u16 own_key[E];
  // First the spans that are on their way to each warp (key, value), in the end the warps' results.
  __shared__ __align__(16) u16 spans_ahead[WARPS][SPANS_AHEAD][2][SPAN][E];
  float (*const merged)[GROUP][E + 2] = reinterpret_cast<float (*)[GROUP][E + 2]>(spans_ahead);
  static_assert(sizeof(float[WARPS * 2][GROUP][E + 2]) <= sizeof(spans_ahead), "results fit where spans were");
  __shared__ bool is_last;
  const int row = blockIdx.x, kv_head = blockIdx.y, split = blockIdx.z;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = lane >> 4, l16 = lane & 15;
  const int heads = num_kv_heads * GROUP;

  const i64 table_row = table_rows ? load_fresh_i64(table_rows + row) : row;
  u16* const out_row = out + ((i64)row * heads + kv_head * GROUP) * E;
  const int position = (int)load_fresh_i64(positions + row);
  const int num_cached = FUSED ? position : position + 1;
  const int spans = table_row < 0 ? 0 : (num_cached + SPAN - 1) / SPAN;
  // Short contexts use fewer splits than were launched: merging costs more than it saves.
  const int needed = (spans + 2 * WARPS - 1) / (2 * WARPS);
  const int splits = needed < 1 ? 1 : needed < max_splits ? needed : max_splits;
  const int stride = splits * WARPS;
  int span = split < splits ? split * WARPS + warp : spans;
  Vec8 k[SPAN / 2], v[SPAN / 2];
  auto page_of = [&](int no) {
    return no < spans ? load_fresh_i64(page_table + table_row * num_table_pages + no * SPAN / PAGE) : 0;
  };
  // What a lane fetches is what it reads later, so nobody has to wait for anybody.
  auto fetch = [&](int slot, int no, i64 page) {
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
      const int in_span = i * 2 + half, t = no * SPAN + in_span;
      const i64 at = ((page * PAGE + t % PAGE) * num_kv_heads + kv_head) * E + l16 * 8;
      if (no < spans) {
        copy_or_zero(&spans_ahead[warp][slot][0][in_span][l16 * 8], key + at, t < num_cached);
        copy_or_zero(&spans_ahead[warp][slot][1][in_span][l16 * 8], value + at, t < num_cached);
      }
    }
    end_of_copies();
  };
  i64 next_page;
  auto start_loading = [&]() {  // the first span into registers, the next ones into shared memory
    const i64 page = page_of(span);
    i64 pages[SPANS_AHEAD];
#pragma unroll
    for (int i = 0; i < SPANS_AHEAD; ++i) pages[i] = page_of(span + (i + 1) * stride);
    next_page = page_of(span + (SPANS_AHEAD + 1) * stride);
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
      const int t = span * SPAN + i * 2 + half;
      const i64 at = ((page * PAGE + t % PAGE) * num_kv_heads + kv_head) * E + l16 * 8;
      k[i] = v[i] = Vec8{{0, 0, 0, 0}};
      if (t < num_cached && span < spans) {
        k[i] = load_fresh(key + at);
        v[i] = load_fresh(value + at);
      }
    }
#pragma unroll
    for (int i = 0; i < SPANS_AHEAD; ++i) fetch(i, span + (i + 1) * stride, pages[i]);
  };
  if (FUSED) start_loading();
  const Rotation q_rotation = load_rotation(q_norm, cos + (i64)position * 64, sin + (i64)position * 64, lane);
  const Rotation k_rotation = load_rotation(k_norm, cos + (i64)position * 64, sin + (i64)position * 64, lane);
  wait_for_inputs();
  let_next_kernel_start();
  if (table_row < 0) {  // padding of a packed prefill
    if (split == 0) {
      for (int i = threadIdx.x; i < GROUP * E; i += WARPS * 32) out_row[i] = 0;
    }
    return;
  }
  if (split >= splits) return;
  if (!FUSED) start_loading();

  const u16* const token = qkv + (i64)row * (heads + 2 * num_kv_heads) * E;
  const bool owns_new = FUSED && split == splits - 1;
  const float missing = missing_scale(unscaled, row, width, eps, lane);
  float low[2], high[2];
  if (warp < GROUP) {
    const u16* const head = token + (kv_head * GROUP + warp) * E;
    rotate(load_fresh_u32(head + 2 * lane), load_fresh_u32(head + 64 + 2 * lane), q_rotation, missing, eps, low,
           high);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      q_shared[warp][2 * lane + i] = low[i] * SCALE;
      q_shared[warp][64 + 2 * lane + i] = high[i] * SCALE;
    }
  }
  if (owns_new && warp == WARPS - 1) {
    const u16* const head = token + (heads + kv_head) * E;
    rotate(load_fresh_u32(head + 2 * lane), load_fresh_u32(head + 64 + 2 * lane), k_rotation, missing, eps, low,
           high);
    const u32 lo = pack_bf16(low[0], low[1]), hi = pack_bf16(high[0], high[1]);
    u16* const to = key + (load_fresh_i64(write_index + row) * num_kv_heads + kv_head) * E;
    *(u32*)(to + 2 * lane) = lo;
    *(u32*)(to + 64 + 2 * lane) = hi;
    *(u32*)(own_key + 2 * lane) = lo;
    *(u32*)(own_key + 64 + 2 * lane) = hi;
  }
  Vec8 new_v[1];
  if (owns_new && warp == 0) {
    new_v[0] = load_fresh(token + (heads + num_kv_heads + kv_head) * E + l16 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) new_v[0].v[i] = scale_pair(new_v[0].v[i], missing);
  }
  __syncthreads();

  float q[GROUP][8];
  Running<GROUP> r;
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    r.peak[h] = -1e30f;
    r.total[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[h][i] = q_shared[h][l16 * 8 + i];
      r.acc[h][i] = 0.0f;
    }
  }
  if (owns_new && warp == 0) {
    const Vec8 new_k[1] = {*(const Vec8*)(own_key + l16 * 8)};
    if (half == 0)
      *(Vec8*)(value + (load_fresh_i64(write_index + row) * num_kv_heads + kv_head) * E + l16 * 8) = new_v[0];
    attend<GROUP, 1>(r, q, new_k, new_v, half == 0);
  }
  int slot = 0;
  while (span < spans) {
    u32 visible = 0;
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) visible |= (u32)(span * SPAN + i * 2 + half < num_cached) << i;
    attend<GROUP, SPAN / 2>(r, q, k, v, visible);
    span += stride;
    if (span >= spans) break;
    wait_for_copies<SPANS_AHEAD - 1>();
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
      k[i] = *(const Vec8*)(&spans_ahead[warp][slot][0][i * 2 + half][l16 * 8]);
      v[i] = *(const Vec8*)(&spans_ahead[warp][slot][1][i * 2 + half][l16 * 8]);
    }
    fetch(slot, span + SPANS_AHEAD * stride, next_page);
    next_page = page_of(span + (SPANS_AHEAD + 1) * stride);
    slot = (slot + 1) % SPANS_AHEAD;
  }
  wait_for_copies<0>();
  __syncthreads();  // every warp has read its spans: their place is free

  // Merge the eight half-warps, then (by the last block to arrive) the splits.
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) merged[warp * 2 + half][h][l16 * 8 + i] = r.acc[h][i];
    if (l16 == 0) {
      merged[warp * 2 + half][h][E] = r.peak[h];
      merged[warp * 2 + half][h][E + 1] = r.total[h];
    }
  }
  __syncthreads();
  const int unit = row * num_kv_heads + kv_head;
  float* const mine = partial + ((i64)unit * max_splits + split) * GROUP * (E + 2);
  for (int i = threadIdx.x; i < GROUP * E; i += WARPS * 32) {
    const int h = i / E, e = i % E;
    float peak = -1e30f, total = 0.0f, acc = 0.0f;
#pragma unroll
    for (int j = 0; j < WARPS * 2; ++j) peak = fmaxf(peak, merged[j][h][E]);
#pragma unroll
    for (int j = 0; j < WARPS * 2; ++j) {
      const float weight = __expf(merged[j][h][E] - peak);
      total += merged[j][h][E + 1] * weight;
      acc += merged[j][h][e] * weight;
    }
    if (splits == 1) {
      out_row[i] = (u16)(pack_bf16(acc / total, 0.0f) & 0xffffu);
    } else {
      mine[h * (E + 2) + e] = acc;
      if (e == 0) {
        mine[h * (E + 2) + E] = peak;
        mine[h * (E + 2) + E + 1] = total;
      }
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 before = atomicAdd(arrived + unit, 1u);
    is_last = before == (u32)splits - 1;
    if (is_last) arrived[unit] = 0;  // ready for the next launch
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const float* const all = partial + (i64)unit * max_splits * GROUP * (E + 2);
  for (int i = threadIdx.x; i < GROUP * E; i += WARPS * 32) {
    const int h = i / E, e = i % E;
    float peak = -1e30f, total = 0.0f, acc = 0.0f;
    for (int j = 0; j < splits; ++j) {
      const float* const part = all + ((i64)j * GROUP + h) * (E + 2);
      const float other = load_fresh_f32(part + E), next = fmaxf(peak, other);
      const float shrink = __expf(peak - next), grow = __expf(other - next);
      total = total * shrink + load_fresh_f32(part + E + 1) * grow;
      acc = acc * shrink + load_fresh_f32(part + e) * grow;
      peak = next;
    }
    out_row[i] = (u16)(pack_bf16(acc / total, 0.0f) & 0xffffu);
  }
}
