"""Judges the Kubernetes manifests: python manifests.py ALLOWED FILE... where ALLOWED has capabilities with commas between them."""
import sys
import yaml

allowed = set(sys.argv[1].split(","))
seen = 0
for name in sys.argv[2:]:
    with open(name) as file:
        documents = list(yaml.safe_load_all(file))
    for document in documents:
        spec = document.get("spec", {})
        spec = spec.get("template", {}).get("spec", spec)
        for container in spec.get("containers", []):
            if "tachyon-bpf" not in container.get("command", []):
                continue
            seen += 1
            security = container["securityContext"]
            what = f"{name}: {container['name']}"
            assert security["capabilities"]["drop"] == ["ALL"], f"{what}: does not drop all capabilities"
            too_much = set(security["capabilities"]["add"]) - allowed
            assert not too_much, f"{what}: {too_much} is not in docs/privileges.md"
            assert not security["privileged"] and not security["allowPrivilegeEscalation"], f"{what}: privileged"
            assert security["readOnlyRootFilesystem"], f"{what}: may write to its root"
            assert security["seccompProfile"]["type"] != "Unconfined", f"{what}: without seccomp"
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), f"{what}: without limits"
            assert {"startupProbe", "livenessProbe"} <= set(container), f"{what}: without probes"
            assert spec.get("hostPID") or spec.get("shareProcessNamespace"), f"{what}: sees itself alone"
            assert not spec.get("hostNetwork") and not spec["automountServiceAccountToken"], f"{what}: needs no network"
assert seen == len(sys.argv) - 2, f"{seen} agents in {len(sys.argv) - 2} manifests"
