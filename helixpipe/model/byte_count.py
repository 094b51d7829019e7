"""Counts the bytes that a store of tensors holds."""

from __future__ import annotations


class ByteCount:
    """Bytes that are held, and the most that ever were."""

    def __init__(self) -> None:
        self._bytes = 0
        self._peak = 0

    def bytes_alive(self) -> int:
        """Bytes held now."""
        return self._bytes

    def peak_bytes(self) -> int:
        """The most that `bytes_alive` ever was."""
        return self._peak

    def count(self, nbytes: int) -> None:
        """Add to the account."""
        self._bytes += nbytes
        self._peak = max(self._peak, self._bytes)
