"""Sizes of models: exact if a configuration is complete, and only our own errors if it is not."""

from __future__ import annotations

import random

import pytest

from relight.cost_model.sizing import OPTIMIZERS, PRECISIONS, from_config, from_count, size_of
from relight.errors import ConfigError, RelightError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
KNOWN = {
    "Llama 3.1 8B": (LLAMA, 8_030_261_248),
    "Llama 3.1 70B": ({**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}, 70_553_706_496),
    "Llama 3.1 405B": ({**LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}, 405_853_388_800),
    "Mixtral 8x7B": ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}, 124_439_808),
    "Qwen2 7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
        7_615_616_512,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        671_026_419_200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_come_out_to_the_parameter(name: str) -> None:
    """Dense, grouped queries, latent attention, mixtures of experts: as many as their makers count."""
    config, parameters = KNOWN[name]
    assert from_config(config).parameters == parameters


def test_only_chosen_experts_are_active() -> None:
    """A token uses 12.9 of Mixtral's 46.7 billion parameters, 37 of DeepSeek-V3's 671, and all of a dense model's."""
    assert from_config(KNOWN["Mixtral 8x7B"][0]).active == pytest.approx(12.9e9, rel=0.01)
    assert from_config(KNOWN["DeepSeek-V3"][0]).active == pytest.approx(37e9, rel=0.02)
    dense = from_config(LLAMA)
    assert dense.active == dense.parameters


def test_tied_embeddings_count_once_and_a_nested_configuration_is_found() -> None:
    """``tie_word_embeddings`` counts. Multimodal models have the language model's configuration in ``text_config``."""
    assert from_config({**LLAMA, "tie_word_embeddings": True}).parameters == 8_030_261_248 - 128256 * 4096
    assert from_config({"model_type": "outer", "text_config": LLAMA}).parameters == 8_030_261_248


def test_mlperf_s_checkpoints_come_out() -> None:
    """MLPerf Storage: 105 GB of an 8B (GiB, 14 bytes a parameter) and 912 of a 70B, within 1 %."""
    assert size_of(from_config(LLAMA)).bytes / 2**30 == pytest.approx(105, rel=0.01)
    assert size_of(from_config(KNOWN["Llama 3.1 70B"][0])).bytes / 2**30 == pytest.approx(912, rel=0.01)


def test_parts_by_optimizer_and_precision() -> None:
    """Bytes of a value of each part match the table, and every combination is a size."""
    model = from_config(LLAMA)
    per_value = {name: size_of(model, "bf16", name).parts["optimizer"] / model.parameters for name in OPTIMIZERS}
    assert per_value["adamw"] == 8
    assert per_value["lion"] == per_value["sgd"] == 4
    assert per_value["adam8bit"] == pytest.approx(2 + 8 / 256)
    assert per_value["adafactor"] < 0.01
    assert 4 < per_value["muon"] < 8
    assert size_of(model, "fp32").bytes == 12 * model.parameters
    assert size_of(model, "bf16-pure").bytes == 6 * model.parameters
    for precision in PRECISIONS:
        for optimizer in OPTIMIZERS:
            number = size_of(from_count("8.03026B"), precision, optimizer).bytes
            assert number == pytest.approx(size_of(model, precision, optimizer).bytes, rel=0.05), (precision, optimizer)


@pytest.mark.parametrize("text", ["", "8X", "-3B", "0", "B", "1e400", "9" * 200, "nan"])
def test_an_invalid_number_of_parameters_is_refused(text: str) -> None:
    """The error shows a valid number."""
    with pytest.raises(ConfigError, match="such as '8B'"):
        from_count(text)


def test_a_configuration_of_something_else_is_refused() -> None:
    """Missing, non-numeric, negative and absurd fields are named. For an unknown precision or optimizer, the error
    lists the known ones."""
    for change in (
        {"hidden_size": None},
        {"vocab_size": "many"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"hidden_size": 10**30},
        {"num_local_experts": True},
    ):
        with pytest.raises(ConfigError):
            from_config({**LLAMA, **change})
    with pytest.raises(ConfigError, match="no precision"):
        size_of(from_count("8B"), "int1")
    with pytest.raises(ConfigError, match="no optimizer"):
        size_of(from_count("8B"), "bf16", "magic")


def test_hostile_configurations_end_in_our_error_or_in_a_size() -> None:
    """3,000 damaged ones: nothing but ``RelightError`` comes out, and at once."""
    pick = random.Random(5)
    odd: list[object] = [None, True, -1, 0, 10**9, 10**12, 1.5, "x", [], {}, [[]], float("nan"), "\x00"]
    names = sorted({name for config, _ in KNOWN.values() for name in config})
    for _ in range(3000):
        config = dict(pick.choice([config for config, _ in KNOWN.values()]))
        for _ in range(pick.randint(1, 4)):
            config[pick.choice(names)] = pick.choice(odd)
        try:
            assert size_of(from_config(config), optimizer=pick.choice(list(OPTIMIZERS))).bytes >= 0
        except RelightError as error:
            assert len(str(error)) < 400
