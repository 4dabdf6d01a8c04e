"""A configuration is refused, with the key that is wrong, before anything starts."""

from __future__ import annotations

import pytest

from harness.config import GROUPS, chosen, group_choices, load_config, top_keys
from traces.errors import UserError


def test_defaults_are_the_main_job() -> None:
    config, plain = load_config([])
    assert config.choices == {
        "engine": "pdd", "trace": "agent_jan", "load": "sessions",
        "wan": "similar", "cluster": "laptop", "model": "tiny",
    }  # fmt: skip
    assert [spec.role for spec in config.cluster.instances] == ["P", "RLD", "MD"]
    assert config.executor_kind == "paced"
    assert plain["model"]["num_layers"] == config.model.num_layers == 4


def test_virtual_time_computes_no_model_unless_asked() -> None:
    assert load_config(["clock=virtual"])[0].executor_kind == "roofline"
    assert load_config(["clock=virtual", "executor=paced"])[0].executor_kind == "paced"


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_composes_and_says_what_it_is(group: str) -> None:
    for name, text in group_choices(group).items():
        assert len(text) > 10, f"conf/{group}/{name}.yaml needs a first comment line"
        assert load_config([f"{group}={name}"])[0].choices[group] == name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("load.requets_per_s=2", "load.requests_per_s"),
        ("scale=2", "trace.scale"),
        ("engin=pdd", "engine"),
        ("engine=cros_pd", "cross_pd"),
        ("+extra=1", "extra"),
        ("seed=abc", "seed: expected `int`"),
        ("limit.requests=0", "limit.requests"),
        ("trace.scale=-1", "trace.scale"),
        ("slice=10", "slice"),
        ("clock=sundial", "clock"),
        ("executor=roofline", "clock=virtual"),
        ("cluster.instances=[{name: p0}]", "cluster.instances"),
        ("cluster.instances=[{name: p0, role: P, site: A, pages: 5}]", "num_pages"),
        ("word", "key=value"),
        ("results_dir=${oc.env:HOME}", "environment"),
        ("seed=[", "seed=["),
    ],
)
def test_a_wrong_override_is_named_with_its_remedy(override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        load_config([override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_snapshot_needs_sessions_at_trace_times() -> None:
    with pytest.raises(UserError, match="start"):
        load_config(["load=closed", "start=snapshot"])


def test_chosen_names_every_group_and_help_has_every_scalar() -> None:
    assert chosen(["engine=pd"])["engine"] == "pd"
    keys = {key for key, _, _ in top_keys()}
    assert {"clock", "seed", "limit.time_s", "sampling.temperature", "results_dir"} <= keys
    assert all(text for _, _, text in top_keys())
