"""Weights that wait in host memory: tables that are looked up there, and a head in blocks."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.model.host_matrices import fill, streamed_matrix
from qlora_wgpu.model.weight_places import WeightPlaces
from qlora_wgpu.model.weight_source import WeightSource, keep_originals
from qlora_wgpu.ops.modules import HostMatrix, StreamedMatrix
from qlora_wgpu.ops.trained_rows import TrainedRows


@dataclass(frozen=True)
class HostWeights:
    """Lays out matrices that the device never has as a whole.

    Attributes:
        source: The files.
        places: Where weights are kept.
    """

    source: WeightSource
    places: WeightPlaces

    def embedding(
        self, name: str, rows: int, columns: int, dtype: str, trained: TrainedRows | None
    ) -> HostMatrix:
        """The input embedding in a type, perhaps with trained rows."""
        return self._looked_up("embedding", name, rows, columns, dtype, trained)

    def table(self, name: str, rows: int, columns: int, dtype: str) -> HostMatrix:
        """A further table in a type; one that its file has in bfloat16 stays so."""
        stays = self.source.is_as_stored(name, columns, "bfloat16")
        return self._looked_up(name, name, rows, columns, "bfloat16" if stays else dtype, None)

    def _looked_up(
        self,
        kind: str,
        name: str,
        rows: int,
        columns: int,
        dtype: str,
        trained: TrainedRows | None,
    ) -> HostMatrix:
        matrix = self.places.waiting[kind] = HostMatrix(rows, columns, dtype, trained=trained)
        self._expect(name, matrix)

        def load() -> None:
            matrix.values = self.source.read_bits(name, (rows, columns), dtype)
            keep_originals(trained, matrix.values, columns, dtype)

        self.places.when_loading(name, load)
        return matrix

    def streamed_head(
        self, name: str, host: HostMatrix, max_binding: int, block: int
    ) -> StreamedMatrix:
        """A head whose blocks come and go.

        Args:
            name: The weight's.
            host: The matrix, not read yet.
            max_binding: Largest number of bytes that one binding may show.
            block: Most rows of a block.
        """
        self.places.waiting["lm_head"] = host
        head = streamed_matrix(name, host, self.places.stream, max_binding, block)
        self._expect(name, host)

        def load() -> None:
            bits = self.source.read_bits(name, (host.rows, host.columns), host.dtype)
            keep_originals(host.trained, bits, host.columns, host.dtype)
            fill(head, bits)

        self.places.when_loading(name, load)
        return head

    def _expect(self, name: str, matrix: HostMatrix) -> None:
        """Counts what reading takes beside the matrix's own bytes, which wait."""
        matrix.as_stored = self.source.is_as_stored(name, matrix.columns, matrix.dtype)
        if not matrix.as_stored:
            taken = self.source.loading_bytes(name, matrix.rows, matrix.columns, matrix.dtype)
            self.places.expect_load(taken - matrix.nbytes)
