"""vLLM's tiered offloading on a CPU: the copy between the KV memory and the host tier, which stock vLLM has for GPUs.

Imported by vLLM in the engine's own environment, by `spec_module_path`. Everything else is vLLM's.
"""

from __future__ import annotations

import os
import time

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuHostTier(TieringOffloadingSpec):
    """The tiers of `secondary_tiers` behind a host tier, for an engine without a GPU."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once. A chunk of the host tier has one block."""

    def __init__(self, kv_caches, region):
        self._refs = kv_caches.group_data_refs
        self._device = [each.tensor for each in kv_caches.tensors]
        self._host = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._region = region
        self._done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec, src_spec.group_sizes)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec, dst_spec.group_sizes)

    def _copy(self, job_id, sources, source_spec, targets, target_spec, group_sizes):
        begun, size, start = time.perf_counter(), 0, 0
        for refs, count in zip(self._refs, group_sizes, strict=True):
            rows = zip(
                source_spec.block_ids[start : start + count].tolist(),
                target_spec.block_ids[start : start + count].tolist(),
                strict=True,
            )
            for source, target in rows:
                for ref in refs:
                    place, length = ref.tensor_idx, ref.page_size_bytes
                    targets[place][target].view(-1)[:length] = sources[place][source].view(-1)[:length]
                    size += length
            start += count
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - begun))
        return True

    def get_finished(self):
        if not self._done:
            time.sleep(0.001)  # an engine with the tier p2p steps for ever, and two of them take all cores
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        """Return at once: every copy is done when it was submitted."""

    def shutdown(self):
        if os.path.exists(self._region.mmap_path):
            os.unlink(self._region.mmap_path)
