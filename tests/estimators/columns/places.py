"""What the tests of tables share."""

import pyarrow as pa


def at(row: int) -> str:
    return "table" if row < 0 else f"row {row}"


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())
