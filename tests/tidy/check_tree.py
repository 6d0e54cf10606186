#!/usr/bin/env python3
"""Checks the structure of the tree: include arrows between rooms, sizes, banned words, dead files.

    check_tree.py ROOT

Sizes ratchet: a file or function past its limit must be listed in ratchet.json with its present
size, and may only shrink. Exit 0 when nothing is wrong, 1 with one line per finding otherwise.
"""

import json
import pathlib
import re
import sys

CODE = {".cc", ".h", ".cu", ".cuh"}
LIMITS = {".h": 200, ".cuh": 400, ".cc": 400, ".cu": 400}
HOST_FUNCTION, KERNEL = 60, 120
ENTRY_POINTS = {"run.sh", "quickstart.sh", "setup.py", "__init__.py"}

# Room -> prefixes it must not include. Paths are relative to the root; kernel headers are included
# as "sparsegdn/...", generated wire headers as "sparsegdn/v1/..." and "sparsegdn/rpc/...".
WIRE = ("sparsegdn/v1/", "sparsegdn/rpc/", "grpc", "google/protobuf")
ARROWS = {
    "kernels/": ("server/", "client/", "prometheus", "spdlog") + WIRE,
    "server/model/": ("server/engine/", "server/service/", "client/", "prometheus") + WIRE,
    "server/engine/": ("server/store/", "server/service/", "client/", "prometheus") + WIRE,
    "server/store/": ("server/service/", "client/", "prometheus") + WIRE,
    "server/service/": ("client/",),
    "client/": ("server/", "kernels/", "sparsegdn/gdn.h", "sparsegdn/types.h", "sparsegdn/c_api.h"),
}
BANNED = [
    (re.compile(r"\b(" + "FIX" + "ME|" + "XX" + r"X|TO" + r"DO)\b"), "open end"),
    (re.compile(r"GTEST_SKIP\(\);|\bDISABLED_"), "silent skip"),
]
EXIT = re.compile(r"(?<![\w.:>])(?:std::)?exit\(")


def tracked(root):
    for path in sorted(root.rglob("*")):
        rel = path.relative_to(root).as_posix()
        if path.is_file() and not rel.startswith((".git/", "build/")) and "__pycache__" not in rel:
            yield rel, path


def functions(lines):
    """(first line number, length, is_kernel) of functions that start at column 0."""
    start, head = None, ""
    for number, line in enumerate(lines, 1):
        if start is None:
            if re.match(r"[A-Za-z_~].*", line) and not line.startswith(
                    ("namespace", "class", "struct", "enum", "union", "using", "typedef", "extern",
                     "#", "}", "public:", "private:", "protected:")):
                head = line if not head or not head.rstrip().endswith((",", "(", ")")) else head + line
                if line.rstrip().endswith("{") and "(" in head and "= {" not in line:
                    start = number
            elif re.match(r"\s+\S", line) and head:
                head += line
                if line.rstrip().endswith("{") and "(" in head and re.match(r"[A-Za-z_]", head) \
                        and not re.search(r"=\s*\{$", line.rstrip()):
                    start = number
            else:
                head = ""
            if line.startswith(("class", "struct", "enum", "union", "namespace")) or \
                    line.rstrip().endswith(";"):
                head = ""
        elif line.startswith("}"):
            yield start, number - start, "__global__" in head
            start, head = None, ""


def dead_links(root, rel, text):
    """Relative links to nothing, and placeholders nobody filled in."""
    folder = (root / rel).parent
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target and not (folder / target).exists():
            yield f"{rel}: link to {target}, which does not exist"
    for word in re.findall(r"@[A-Z_]+@", text):
        yield f"{rel}: placeholder {word}"


def check(root, ratchet):
    findings, seen = [], {}
    texts = {}
    for rel, path in tracked(root):
        try:
            texts[rel] = path.read_text()
        except UnicodeDecodeError:
            continue
    words = set()
    for rel, text in texts.items():
        if rel != "tests/tidy/check_tree_test.py":
            for word in set(re.findall(r"[\w.\-]+", text)):
                words.update((word, word.strip(".-")), word.split("."))
    for rel, text in texts.items():
        suffix = pathlib.PurePosixPath(rel).suffix
        lines = text.split("\n")
        if suffix == ".md":
            findings += dead_links(root, rel, text)
        if suffix in CODE or suffix in {".py", ".sh"}:
            for number, line in enumerate(lines, 1):
                for pattern, why in BANNED:
                    if pattern.search(line) and not rel.startswith("tests/tidy/"):
                        findings.append(f"{rel}:{number}: {why}: {line.strip()[:80]}")
            path = pathlib.PurePosixPath(rel)
            word = path.stem if suffix == ".py" else path.name  # Python imports the stem
            if path.name not in ENTRY_POINTS and word not in words:
                findings.append(f"{rel}: no other file names it: dead?")
        if suffix not in CODE:
            continue
        for number, line in enumerate(lines, 1):
            include = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
            if include:
                for room, banned in ARROWS.items():
                    if rel.startswith(room) and include.group(1).startswith(banned):
                        findings.append(f"{rel}:{number}: {room} must not include {include.group(1)}")
                if include.group(1).startswith("grpc") and not rel.startswith(
                        ("server/service/", "server/main.cc", "client/", "tests/")):
                    findings.append(f"{rel}:{number}: gRPC outside server/service, main and client")
            if EXIT.search(line) and "//" not in line.split("exit(")[0] and \
                    not rel.startswith("tests/"):
                findings.append(f"{rel}:{number}: exit( is banned")
        if "tests/" in rel:
            continue
        limit = LIMITS[".cc"] if rel.endswith("-inl.h") else LIMITS[suffix]  # code, not contract
        sizes = [(rel, len(lines) - 1, limit)]
        sizes += [(f"{rel}:function {n}", size, KERNEL if is_kernel else HOST_FUNCTION)
                  for n, (_, size, is_kernel) in enumerate(functions(lines))]
        for key, size, limit in sizes:
            if size > limit:
                seen[key] = size
                if size > ratchet.get(key, 0):
                    findings.append(f"{key}: {size} lines, at most {ratchet.get(key, limit)}")
    for key in ratchet:
        if key not in seen:
            findings.append(f"ratchet.json: {key} is within its limit now: drop it")
    return findings


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    ratchet = json.loads((pathlib.Path(__file__).parent / "ratchet.json").read_text())
    findings = check(root, ratchet)
    print("\n".join(findings) or "tree is tidy")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
