"""Convert the keys of transformers' TrainingArguments, which LLaMA-Factory and TRL configs also use."""

from __future__ import annotations

from chatmill.integrations.configs.axolotl_notes import KERNEL, TRACKER, UPLOAD
from chatmill.integrations.configs.model_keys import take_checkpointing, take_precision, take_sharding
from chatmill.integrations.configs.report import TheirKeys, Translation
from chatmill.integrations.configs.run_keys import RunNames, take_run
from chatmill.integrations.configs.run_output import (
    take_evaluation,
    take_logging,
    take_output_dir,
    take_report_to,
    take_saving,
    take_seed,
)

_GROUPS: dict[str, str] = {
    "tf32 bf16_full_eval fp16_full_eval half_precision_backend gradient_checkpointing_kwargs "
    "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
    "torch_empty_cache_steps logging_first_step logging_strategy log_on_each_node logging_nan_inf_filter "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm per_device_eval_batch_size "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object prediction_loss_only "
    "batch_eval_metrics include_for_metrics save_on_each_node enable_jit_checkpoint ignore_data_skip "
    "restore_callback_states_from_checkpoint use_cpu accelerator_config parallelism_config "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context "
    "remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank skip_memory_metrics debug "
    "group_by_length train_sampling_strategy fsdp_transformer_layer_cls_to_wrap "
    "fsdp_min_num_params ray_scope save_safetensors average_tokens_across_devices full_determinism": KERNEL,
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
    "hub_model_revision": UPLOAD,
    "trackio_space_id trackio_bucket_id trackio_static_space_id": TRACKER,
    "run_name project": ("set an environment variable of the tracker instead, such as WANDB_NAME or WANDB_PROJECT"),
    "optim_args optim_target_modules": "this option is for another optimizer and has no effect",
    "label_smoothing_factor": "chatmill does not smooth labels; the loss will differ",
    "neftune_noise_alpha": "chatmill does not add noise to embeddings; the loss will differ",
    "auto_find_batch_size": "chatmill does not adjust the batch size; --estimate shows whether the run fits in memory",
    "eval_delay eval_on_start": "chatmill evaluates every eval_interval steps and at the end",
    "greater_is_better": "chatmill selects the checkpoint with the lowest val loss",
    "save_only_model": "checkpoints also contain the optimizer state, so that a run can resume",
    "do_predict": "each evaluation generates eval_samples answers; use `chatmill chat` to generate more",
    "overwrite_output_dir": "chatmill does not overwrite a run; give each run a new --model_name",
    "do_train": "`chatmill train` always trains, so this key has no effect",
    "do_eval": "chatmill evaluates if the dataset has a val split",
    "resume_from_checkpoint": (
        "chatmill cannot resume checkpoints of other trainers; the run starts from the base model"
    ),
}
NOTES = {name: note for names, note in _GROUPS.items() for name in names.split()}


def take_training_arguments(translation: Translation, keys: TheirKeys, names: RunNames, *, checkpointing: bool) -> bool:
    """Convert the keys of TrainingArguments; return whether the config enables evaluation.

    `checkpointing` is the trainer's default for activation checkpointing.
    """
    take_run(translation, keys, names)
    take_seed(translation, keys, 42)
    take_precision(translation, keys)
    take_checkpointing(translation, keys, default=checkpointing)
    take_sharding(translation, keys)
    if (compiled := keys.switch("torch_compile")) is not None:
        translation.take(keys.path("torch_compile"), compiled, train={"compile": compiled})
    drop = keys.switch("dataloader_drop_last")
    if drop is not None:
        translation.take(keys.path("dataloader_drop_last"), drop, train={"epoch_drop_last": drop})
    else:
        translation.assume(f"{translation.trainer} uses this value by default", train={"epoch_drop_last": False})
    take_output_dir(translation, keys)
    take_logging(translation, keys)
    take_report_to(translation, keys)
    take_saving(translation, keys)
    evaluates = take_evaluation(translation, keys, default=False)
    if (metric := keys.text("metric_for_best_model")) is not None:
        if metric in ("loss", "eval_loss"):
            translation.default(
                keys.path("metric_for_best_model"),
                metric,
                note="chatmill also uses the val loss to select the best checkpoint",
            )
        else:
            note = "chatmill selects the checkpoint with the lowest val loss"
            translation.none(keys.path("metric_for_best_model"), metric, note)
    return evaluates
