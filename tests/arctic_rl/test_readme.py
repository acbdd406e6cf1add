import dataclasses
from pathlib import Path

from integrations.arctic_rl.config import ArcticRLConfig
from integrations.arctic_rl.server.http.settings import HttpSettings
from integrations.arctic_rl.support.entries import Refused
from integrations.arctic_rl.support.markdown import BEGIN, END, markdown
from integrations.arctic_rl.support.table import TABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_the_table_of_settings_names_every_setting_with_its_default():
    defaults = dataclasses.asdict(ArcticRLConfig())
    ours = README[README.index("\n## Settings\n") : README.index(BEGIN)]
    rows = [line.split("|") for line in ours.splitlines() if line.startswith("| `")]
    written = {row[1].strip().strip("`"): row[2].strip().strip("`") for row in rows}
    assert written == {name: "null" if value is None else str(value) for name, value in defaults.items()}


def test_the_table_of_the_servers_settings_names_every_one_with_its_default():
    written = {}
    for line in HTTP.splitlines():
        if line.startswith("| `"):
            names, values = ([part.strip("` ") for part in cell.split(", ")] for cell in line.split("|")[1:3])
            written.update(zip(names, values, strict=True))
    defaults = {name: value for name, value in vars(HttpSettings()).items() if name != "token"}
    assert written == {name: "null" if value is None else str(value) for name, value in defaults.items()}


def test_the_support_table_is_the_generated_one():
    written = README[README.index(BEGIN) : README.index(END) + len(END)]
    assert written == markdown(), "write the output of python -m integrations.arctic_rl.support into README.md"


FEATURES = {
    "a row is computed by one GPU here, with more memory than the recipe reckons with (on CPUs: no effect)": (
        "rows split over GPUs"
    ),
    "auxiliary losses that balance experts are not there": "balancing losses",
    "an engine is not split into data-parallel ones": "data-parallel engines",
    "engines are vLLM's": "engines that are not vLLM's",
    "engines on GPUs of their own keep their caches' memory in a weight sync": "`offload_kv_for_weight_sync`",
    "engines of prefill or decoding only are not there": "servers of prefill alone",
    "experts get no adapters of their own": "adapters of experts",
    "external servers are not there": "external servers",
    "fake quantisation is not there": "fake quantisation",
    "gradients are reduced in float32": "gradients reduced in other than float32",
    "it would change the model": "other changes of Megatron's to routers and models",
    "multi-token-prediction heads are not trained": "multi-token-prediction heads",
    "multimodal models are not there yet": "`language_model_only`",
    "parameters cannot be frozen yet": "frozen parameters",
    "rollouts in another precision than training change the result": "fp8",
    "router replay is not there": "replay of routers",
    "routers compute in the model's dtype": "other changes of Megatron's to routers and models",
    "SkyRL does not forward it to the engine": "`repetition_penalty`",
    "the sampler's support is not replayed": "the sampler's support",
    "the sampler's support is not returned": "the sampler's support",
    "this backend trains": "simulated training",
    "training in fp8 is not there": "fp8",
    "vision is not there": "multimodal models",
}


def test_every_refused_feature_is_listed_in_the_text():
    start = README.index("\n## Not there yet\n")
    listed = " ".join(README[start : README.index("\n## ", start + 1)].split())
    assert {entry.why for entry in TABLE.values() if isinstance(entry, Refused)} == FEATURES.keys()
    assert [name for name in FEATURES.values() if name not in listed] == []
