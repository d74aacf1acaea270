"""Judges the memory in a soak's report again, by the rule of today: python -m tests.system.reevaluate soak.json

The file is written anew. Nothing else in it changes; what the run itself said of memory stays in it, as
"superseded".
"""

import json
import sys
from pathlib import Path

from tests.system.test_soak import rejudged


def main() -> None:
    file = Path(sys.argv[1])
    report = rejudged(json.loads(file.read_text()))
    file.write_text(json.dumps(report, allow_nan=False) + "\n")
    sys.stdout.write(
        f"{len(report['superseded'])} lines about memory superseded; failures now:"
        f" {report['failures'] or 'none'}\n"
    )


if __name__ == "__main__":
    main()
