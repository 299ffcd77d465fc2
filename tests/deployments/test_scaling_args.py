import pytest
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig

from deployments.app_args import AppArgs
from deployments.scaling_args import ScalingArgs


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"talker": {"min_replicas": 1}}, "autoscaling.talker.max_replicas"),
        ({"talker": {"max_replicas": True}}, "autoscaling.talker.max_replicas"),
        ({"talker": {"max_replicas": "4"}}, "autoscaling.talker.max_replicas"),
        ({"talker": {"max_replicas": 0}}, "autoscaling.talker.max_replicas"),
        ({"talker": {"max_replicas": 2, "min_replicas": 3}}, "autoscaling.talker"),
        ({"talker": {"max_replicas": 2, "initial_replicas": 3}}, "autoscaling.talker"),
        ({"codec": {"max_replicas": 2, "max_use": 0.5}}, "autoscaling.codec"),
        ({"codec": {"max_replicas": 2, "max_use": 1.5}}, "autoscaling.codec.max_use"),
        ({"codec": {"max_replicas": 2, "target_ongoing_requests": 3}}, "autoscaling.codec.target_ongoing_requests"),
        ({"encoder": {"max_replicas": 2}}, "autoscaling.encoder"),
        ({"reference_encoder": {"max_replicas": 2, "upscale_delay_s": -1}}, "autoscaling.reference_encoder.upscale_delay_s"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_stops_the_start_by_name(scaling, key):
    """known_faults row 49: at once, with the key."""
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"checkpoint": "x", "autoscaling": scaling})
    assert key in {".".join(map(str, error["loc"])) for error in caught.value.errors()}


def test_serve_takes_what_we_give_it():
    args = ScalingArgs(max_replicas=4, min_replicas=0, initial_replicas=2, upscale_delay_s=1, max_use=0.9)
    config = AutoscalingConfig(**args.autoscaling_config)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 2, 4)
    assert config.upscale_delay_s == 1
    assert config.policy.policy_function == "deployments.autoscaling:FreeSlotsPolicy"
    assert config.policy.policy_kwargs["max_use"] == 0.9


def test_models_take_the_scaling_of_the_level_above_unless_they_have_their_own():
    shared, own = {"talker": {"max_replicas": 2}}, {"talker": {"max_replicas": 5}}
    args = AppArgs.model_validate(
        {
            "autoscaling": shared,
            "models": [{"checkpoint": "a"}, {"checkpoint": "b", "autoscaling": own}],
        }
    )
    assert [model.autoscaling.talker.max_replicas for model in args.served] == [2, 5]
