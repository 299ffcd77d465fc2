// One spoken text as it came: its samples, the loudness that is drawn, and its file.

export const LEVELS_PER_SECOND = 100;

export class Take {
  /** request: the fields that were sent, without the page's own `stream` and `response_format`. */
  constructor(request) {
    this.request = request;
    this.levels = []; // root mean square of each 10 ms, in [0, 1]
    this.isWhole = false; // until the last byte is here; a stopped or broken one never is
    this.seed = null;
    this.sampleRate = 0;
    this.numSamples = 0;
    this.#parts = [];
    this.#odd = new Uint8Array(0);
  }

  #parts;
  #odd; // half a sample: the network cuts where it likes
  #energy = 0; // of the 10 ms that aren't full yet

  begin(sampleRate, seed) {
    this.sampleRate = sampleRate;
    this.seed = seed;
  }

  get seconds() {
    return this.sampleRate ? this.numSamples / this.sampleRate : 0;
  }

  /** bytes: PCM16, little endian, mono. Returns its samples, as Float32Array in [-1, 1). */
  append(bytes) {
    const joined = new Uint8Array(this.#odd.length + bytes.length);
    joined.set(this.#odd);
    joined.set(bytes, this.#odd.length);
    const numWhole = joined.length >> 1;
    this.#odd = joined.slice(2 * numWhole);
    const view = new DataView(joined.buffer);
    const pcm = new Int16Array(numWhole);
    for (let n = 0; n < numWhole; n += 1) pcm[n] = view.getInt16(2 * n, true);
    this.#parts.push(pcm);
    const samples = asFloats(pcm);
    this.#measure(samples);
    return samples;
  }

  /** Everything so far, in parts as they came. */
  *samples() {
    for (const pcm of this.#parts) yield asFloats(pcm);
  }

  wav() {
    const numBytes = 2 * this.numSamples;
    const header = new DataView(new ArrayBuffer(44));
    const words = [[0, "RIFF"], [8, "WAVE"], [12, "fmt "], [36, "data"]];
    for (const [at, word] of words) {
      for (const [n, letter] of [...word].entries()) header.setUint8(at + n, letter.charCodeAt(0));
    }
    const longs = [[4, 36 + numBytes], [16, 16], [24, this.sampleRate], [28, 2 * this.sampleRate], [40, numBytes]];
    for (const [at, value] of longs) header.setUint32(at, value, true);
    const shorts = [[20, 1], [22, 1], [32, 2], [34, 16]]; // PCM, mono, bytes a frame, bits a sample
    for (const [at, value] of shorts) header.setUint16(at, value, true);
    return new Blob([header, this.#bytes()], { type: "audio/wav" });
  }

  pcm() {
    return new Blob([this.#bytes()], { type: "audio/pcm" });
  }

  #bytes() {
    const view = new DataView(new ArrayBuffer(2 * this.numSamples));
    let at = 0;
    for (const pcm of this.#parts) {
      for (const value of pcm) {
        view.setInt16(at, value, true);
        at += 2;
      }
    }
    return view.buffer;
  }

  #measure(samples) {
    const perLevel = Math.round(this.sampleRate / LEVELS_PER_SECOND);
    for (const value of samples) {
      this.#energy += value * value;
      this.numSamples += 1;
      if (this.numSamples % perLevel === 0) {
        this.levels.push(Math.sqrt(this.#energy / perLevel));
        this.#energy = 0;
      }
    }
  }
}

function asFloats(pcm) {
  const samples = new Float32Array(pcm.length);
  for (let n = 0; n < pcm.length; n += 1) samples[n] = pcm[n] / 32768;
  return samples;
}
