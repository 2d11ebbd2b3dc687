"""Metrics of the game beyond `looplab.rl.metrics.SCHEMA`: Mario's position and the parts of the shaped reward."""

from __future__ import annotations

from looplab.rl.metrics import MetricField

FIELDS = (
    MetricField("episode_max_x_mean", "float", "px", "Mean over episodes of the furthest x.",
                info="x_pos", reduce="episode_max"),
    MetricField("env_mean_x_pos", "float", "px", "Mean x over all steps.", info="x_pos", reduce="mean"),
    MetricField("env_max_x_pos", "float", "px", "Furthest x of any step.", info="x_pos", reduce="max"),
    MetricField("env_distance_delta_sum", "float", "px", "Sum of all changes of x, including backward ones.",
                info="shaping_dx", reduce="sum"),
    MetricField("env_shaping_raw_sum", "float", "reward", "Sum of the shaping reward before scaling.",
                info="shaping_raw", reduce="sum"),
    MetricField("env_shaping_scaled_sum", "float", "reward", "Sum of the shaping reward as added to the reward.",
                info="shaping_scaled", reduce="sum"),
    MetricField("env_stagnations", "int", "episodes", "Episodes truncated for lack of progress.",
                info="stagnation", reduce="sum"),
    MetricField("env_shaping_last_dx", "float", "px", "Change of x in the last step.", info="shaping_dx"),
    MetricField("env_shaping_last_raw", "float", "reward", "Shaping reward before scaling in the last step.",
                info="shaping_raw"),
    MetricField("env_shaping_last_scaled", "float", "reward", "Shaping reward as added in the last step.",
                info="shaping_scaled"),
    MetricField("env_shaping_scale", "float", "", "Scale of the shaping reward in the last step.",
                info="shaping_scale"),
    MetricField("env_shaping_parse_fail", "int", "failures", "Failed reads of x from RAM so far, in one env.",
                info="ram_parse_failures"),
)  # fmt: skip
