"""A few checks of kernels as subgroups cut them, by the vectors that Mesa is told of; as JSON."""

import json

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.results import _result

# Rows held and not held; columns, rows and heads that subgroups divide among them.
CHECKS = {
    "rms_norm": 8,
    "few_rows_of_a_group": 1,
    "packed_weights_of_a_group": 1,
    "rotated_append": 1,
}

device = Device()
cases = cases_for(device.profile)
results = {}
for name, count in CHECKS.items():
    own = [case for case in cases if case.check == name and not case.in_textures][:count]
    result = _result(device, own, "own", device.profile, "bfloat16")
    results[name] = {"good": result.good, "excess": result.excess, "refusal": result.refusal}
print(json.dumps({"lanes": device.profile.subgroup_size, "results": results}))
