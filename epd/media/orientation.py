"""Whether EXIF says that a stored image is to be shown with its sides swapped."""

from __future__ import annotations

import struct
from struct import unpack_from

_ORIENTATION_TAG = 0x0112
_SHORT = 3
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}


def is_transposed(exif: bytes) -> bool:
    """Whether the EXIF orientation is one of the four (5 to 8) that swap width and height.

    `exif` is a TIFF block, with or without the `Exif` prefix. A damaged block counts as upright,
    as viewers treat it.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return False
    try:
        (directory,) = unpack_from(order + "I", tiff, 4)
        (num_entries,) = unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind = unpack_from(order + "HH", tiff, entry)
            if tag == _ORIENTATION_TAG:
                value_format = order + ("H" if kind == _SHORT else "I")
                return 5 <= unpack_from(value_format, tiff, entry + 8)[0] <= 8
    except struct.error:
        pass
    return False
