"""Records what models become as GGUF files, and what those are read as: tests/gguf/records.json.

usage: python tools/gguf_records.py [--details FOLDER], which writes all that is hashed there
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.gguf_models import CHANGES
from support.gguf_records import RECORDS, record


def main() -> None:
    """Records all cases."""
    details = Path(sys.argv[2]) if sys.argv[1:2] == ["--details"] else None
    records = {}
    for case in CHANGES:
        known: dict[str, object] = {}
        with tempfile.TemporaryDirectory() as place:
            records[case] = record(case, Path(place), known.__setitem__)
        if details is not None:
            details.mkdir(exist_ok=True, parents=True)
            (details / f"{case}.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
        print(case, flush=True)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
