"""Stands in for FlashInfer where there is no GPU: the two wrappers that we use, in plain PyTorch.

Reads what the real ones read and when: `plan` keeps lengths and copies its arrays into the buffers it
was given, `run` looks at nothing but those buffers and the cache. Says no where the real ones do.
"""

from types import SimpleNamespace

import torch


class _Wrapper:
    def __init__(self, workspace, kv_layout, *, starts, pages, last):
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8
        self._starts, self._pages, self._last = starts, pages, last
        self.num_plans = 0

    def reset_workspace_buffer(self, workspace, ints):
        assert ints.numel() >= 1 << 16

    def _keep(self, starts, pages, last, sizes):
        assert {t.dtype for t in (starts, pages, last)} == {torch.int32}
        assert len(starts) == len(self._starts), "the batch size should be fixed"
        assert len(pages) <= len(self._pages), "the length of paged_kv_indices exceeds the buffer"
        assert int(starts[-1]) == len(pages)
        self._starts.copy_(starts)
        self._last.copy_(last)
        self._pages[: len(pages)].copy_(pages)
        self._heads, self._kv_heads, self._head_dim, self._page_size = sizes
        self.num_plans += 1

    def _context(self, sequence, kv):
        """Keys and values of one sequence, widened; [T, K, E] each."""
        pages = self._pages[self._starts[sequence] : self._starts[sequence + 1]].long()
        if not len(pages):
            return None
        num_context = (len(pages) - 1) * self._page_size + int(self._last[sequence])
        return [cache[pages].flatten(0, 1)[:num_context].float() for cache in kv]

    def _attend(self, q, context):
        """q: [n, H, E], the sequence's last n positions."""
        keys, values = (c.repeat_interleave(self._heads // self._kv_heads, dim=1) for c in context)
        scores = torch.einsum("nhe,the->hnt", q.float(), keys) * self._head_dim**-0.5
        later = torch.arange(len(keys)) > torch.arange(len(keys) - len(q), len(keys))[:, None]
        return torch.einsum("hnt,the->nhe", scores.masked_fill(later, float("-inf")).softmax(-1), values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, workspace, kv_layout, *, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
        paged_kv_indices_buf, paged_kv_last_page_len_buf, backend,
    ):  # fmt: skip
        assert use_cuda_graph
        super().__init__(
            workspace,
            kv_layout,
            starts=paged_kv_indptr_buf,
            pages=paged_kv_indices_buf,
            last=paged_kv_last_page_len_buf,
        )
        self._rows, self._most_rows = qo_indptr_buf, None

    def plan(
        self, row_starts, starts, pages, last, heads, kv_heads, head_dim, page_size, *,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        assert sm_scale == head_dim**-0.5
        if self._most_rows is None:
            self._most_rows = int(row_starts[-1])
        assert int(row_starts[-1]) <= self._most_rows, "total rows cannot exceed those at initialization"
        self._rows.copy_(row_starts)
        self._keep(starts, pages, last, (heads, kv_heads, head_dim, page_size))

    def run(self, q, kv, *, out):
        for sequence, (first, end) in enumerate(zip(self._rows, self._rows[1:], strict=False)):
            if end > first:
                out[first:end] = self._attend(q[first:end], self._context(sequence, kv)).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, workspace, kv_layout, *, use_cuda_graph, use_tensor_cores, paged_kv_indptr_buffer,
        paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend,
    ):  # fmt: skip
        assert use_cuda_graph
        super().__init__(
            workspace,
            kv_layout,
            starts=paged_kv_indptr_buffer,
            pages=paged_kv_indices_buffer,
            last=paged_kv_last_page_len_buffer,
        )

    def plan(
        self, starts, pages, last, heads, kv_heads, head_dim, page_size, *, sm_scale, q_data_type, kv_data_type
    ):  # fmt: skip
        assert sm_scale == head_dim**-0.5
        self._keep(starts, pages, last, (heads, kv_heads, head_dim, page_size))

    def run(self, q, kv, *, out):
        assert len(q) == len(self._last)
        for row in range(len(q)):
            out[row] = self._attend(q[row : row + 1], self._context(row, kv))[0].to(out.dtype)


def library():
    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    )
