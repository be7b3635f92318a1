#!/usr/bin/env python3
"""Prints a CycloneDX 1.5 bill of materials: all code of others that the command is built from.

`cargo metadata` knows the packages, their licences and checksums; nothing is fetched here.
"""

import json
import subprocess
import sys


def main(version):
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform"]
    host = next(line for line in run(["rustc", "-vV"]).splitlines() if line.startswith("host: "))
    metadata = json.loads(run(command + [host.removeprefix("host: ")]))
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = next(p["id"] for p in metadata["packages"] if p["name"] == "becket" and p["source"] is None)
    edges = {}
    visit(root, nodes, edges)
    members = set(metadata["workspace_members"])
    others = sorted((i for i in edges if i not in members), key=lambda i: name(packages[i]))
    # Crates of this project are parts of the one component that this bill is of.
    flat = sorted({i for member in edges if member in members for i in edges[member] if i not in members})
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "becket",
                "name": "becket",
                "version": version,
                "licenses": [{"expression": packages[root]["license"]}],
            }
        },
        "components": [component(packages[i]) for i in others],
        "dependencies": [{"ref": "becket", "dependsOn": [purl(packages[i]) for i in flat]}]
        + [{"ref": purl(packages[i]), "dependsOn": sorted(purl(packages[d]) for d in edges[i])} for i in others],
    }
    json.dump(bill, sys.stdout, indent=1)
    print()


def run(command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def visit(package, nodes, edges):
    """What ends up in the command, or builds it: not what only tests use."""
    if package in edges:
        return
    kinds = [d for d in nodes[package]["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"])]
    edges[package] = [d["pkg"] for d in kinds]
    for dependency in edges[package]:
        visit(dependency, nodes, edges)


def name(package):
    return (package["name"], package["version"])


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package):
    found = {"type": "library", "bom-ref": purl(package), "name": package["name"], "version": package["version"]}
    if package.get("license"):
        # Cargo's older spelling of OR.
        found["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    found["purl"] = purl(package)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: scripts/bill-of-materials.py VERSION")
    main(sys.argv[1])
