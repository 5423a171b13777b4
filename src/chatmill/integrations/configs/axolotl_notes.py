"""Notes on Axolotl keys that have no counterpart in chatmill."""

from __future__ import annotations

ATTENTION = "chatmill chooses the attention implementation; the result is the same"
KERNEL = "this key affects only speed or memory, not the result"
UPLOAD = "chatmill does not upload anything"
LOSS = "the loss will differ"
NO_CODE = "chatmill does not run third-party code"
PREFERENCE = "chatmill supports only SFT, not preference or reward training"
TRACKER = "chatmill does not support this tracker; report_to takes tensorboard, wandb and mlflow"
SHARDS = "chatmill splits rows across ranks, not layers or sequences; the memory per GPU will differ"
MOE = "chatmill uses transformers' mixture-of-experts layers; the speed will differ"
_GROUPS: dict[str, str] = {
    "attn_implementation flash_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
    "flash_attn_fuse_qkv flash_optimum xformers_attention sdp_attention s2_attention flex_attention "
    "flex_attn_compile_kwargs eager_attention sage_attention fused_attn_kernel gemma4_hybrid_attn_impl "
    "pretrain_multipack_attn multipack_real_batches": ATTENTION,
    "tf32 low_cpu_mem_usage liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_swiglu "
    "liger_fused_linear_cross_entropy liger_cross_entropy liger_rms_norm_gated liger_use_token_scaling "
    "cut_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels "
    "unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm "
    "unsloth_rope tiled_mlp tiled_mlp_num_shards gradient_checkpointing_kwargs selective_checkpointing "
    "layer_offloading torch_empty_cache_steps gc_collect_steps gc_steps dataloader_pin_memory "
    "dataloader_num_workers dataloader_prefetch_factor dataset_processes dataset_num_proc "
    "dataset_keep_in_memory dataset_prepared_path num_dataset_shards_to_save skip_prepare_dataset "
    "remove_unused_columns group_by_length pad_to_sequence_len eval_sample_packing "
    "sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method "
    "sample_packing_eff_est sample_packing_seq_len_multiplier total_num_tokens total_supervised_tokens "
    "eval_batch_size experimental_skip_move_to_device lora_on_cpu device_map max_memory gpu_memory_limit "
    "torch_compile_backend torch_compile_mode ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_find_unused_parameters accelerator_config fsdp_version fsdp_final_state_dict_type local_rank "
    "world_size device qlora_sharded_model_loading embeddings_skip_upcast peft_autocast_adapter_dtype "
    "use_ray ray_run_name ray_num_workers resources_per_worker flash_attn_supports_top_left_mask "
    "fp8_enable_fsdp_float8_all_gather streaming_multipack_buffer_size sample_packing_drop_attention_mask "
    "float8 is_preprocess preprocess_iterable axolotl_config_path debug include_tokens_per_second "
    "include_tkps profiler_steps profiler_steps_start save_safetensors merge_lora merge_method strict "
    "dynamic_checkpoint bnb_config_kwargs": KERNEL,
    "quantize_moe_experts use_scattermoe use_sonicmoe experts_implementation llama4_linearized_experts "
    "dsv4_fp4_grouped_mode use_dsv4_kernels use_glm_dsa_kernels expert_parallel_num_nvl_bytes "
    "expert_parallel_token_capacity nvfp4_merge_aware": MOE,
    "tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size dp_replicate_size "
    "expert_parallel_size heads_k_stride ring_attn_func": SHARDS,
    "hub_model_id hub_strategy hub_revision push_dataset_to_hub": UPLOAD,
    "hf_use_auth_token": "chatmill uses HF_TOKEN, or the token that `hf auth login` saved",
    "trust_remote_code": NO_CODE,
    "trainer_cls": f"{NO_CODE}; it uses its own training loop",
    "plugins": f"{NO_CODE}, so plugins have no effect on training",
    "tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
    "tokenizer_save_jinja_files model_type type_of_model base_model_config cls_model_config "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
    "base_model_ignore_patterns gptq_model_v1": (
        "the files in the model folder determine the model and tokenizer classes"
    ),
    "model_config overrides_of_model_config overrides_of_model_kwargs model_kwargs rope_scaling": (
        "chatmill uses config.json in the model folder unchanged; edit that file"
    ),
    "model_quantization_config model_quantization_config_kwargs gptq gptq_groupsize gptq_disable_exllama "
    "gptq_bits": "chatmill rejects quantized base models; use an unquantized model and load_in_4bit",
    "qat quantization": "chatmill does not support quantization-aware training; the loss will differ",
    "use_onebitllms": "chatmill does not support 1.58-bit training; the loss will differ",
    "tokens added_tokens_overrides resize_token_embeddings_to_32x mean_resizing_embeddings "
    "shrink_embeddings fix_untrained_tokens": (
        "chatmill neither adds tokens nor resizes embeddings; add tokens to the model folder first"
    ),
    "lora_modules_to_save": "chatmill trains only the adapters, not these modules; the loss will differ",
    "lora_model_dir": "chatmill trains new adapters; merge existing adapters into the model first",
    "lora_target_parameters lora_rank_pattern lora_alpha_pattern peft_layers_to_transform "
    "peft_layers_pattern peft_layer_replication peft_trainable_token_indices peft_ensure_weight_tying": (
        "all target layers have adapters with the same rank and alpha; the loss will differ"
    ),
    "lora_fan_in_fan_out": "peft detects this automatically; the result is the same",
    "peft_use_dora peft_init_lora_weights peft": (
        "chatmill trains plain LoRA with the usual initial weights; the loss will differ"
    ),
    "loraplus_lr_ratio loraplus_lr_embedding": (
        "both matrices of an adapter have the same learning rate; the loss will differ"
    ),
    "relora relora_steps relora_prune_ratio relora_prune_method relora_cpu_offload relora_warmup_steps "
    "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps": (
        "chatmill does not merge and restart adapters during a run; the loss will differ"
    ),
    "lisa_n_layers lisa_step_interval lisa_layers_attribute": (
        "chatmill trains all layers in each step; the loss will differ"
    ),
    "unfrozen_parameters freeze_mm_modules": ("chatmill cannot freeze individual weights; the loss will differ"),
    "embedding_lr embedding_lr_scale lr_groups": "all weights have the same learning rate; the loss will differ",
    "optim_args optim_target_modules torchdistx_path adam_epsilon2 adam_beta3 adam_eps dion_lr "
    "dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap "
    "qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size "
    "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size": (
        "this option is for another optimizer and has no effect"
    ),
    "lr_quadratic_warmup lr_div_factor cosine_constant_lr_ratio": (
        "chatmill does not support this schedule option; the loss will differ"
    ),
    "neftune_noise_alpha noisy_embedding_alpha": "chatmill does not add noise to embeddings; the loss will differ",
    "use_eaft eaft_alpha eaft_k": "chatmill uses plain cross entropy; the loss will differ",
    "loss_watchdog_threshold loss_watchdog_patience": (
        "a high loss does not stop the run; check the loss in metrics.jsonl"
    ),
    "auto_find_batch_size": "chatmill does not adjust the batch size; --estimate shows whether the run fits in memory",
    "shuffle_before_merging_datasets": "chatmill shuffles all rows in each epoch",
    "sample_packing_sequentially curriculum_sampling": (
        "chatmill packs rows by best fit and shuffles them; the order will differ"
    ),
    "dataset_shard_num dataset_shard_idx": "chatmill reads the whole dataset; set max_samples to read part of it",
    "eval_sequence_len": "val rows have the same maximum length as train rows",
    "max_packed_sequence_len": "chatmill uses sequence_len as the maximum length of packed rows",
    "max_prompt_len": PREFERENCE,
    "do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens do_bench_eval "
    "bench_dataset bench_split generate_samples num_generation_samples generation_max_new_tokens "
    "generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
    "generation_do_sample": "the loss is the only metric; eval_samples sets the number of answers to generate",
    "greater_is_better": "chatmill selects the checkpoint with the lowest val loss",
    "save_only_model": "checkpoints also contain the optimizer state, so that a run can resume",
    "save_first_step": "chatmill saves the first checkpoint after save_interval steps",
    "wandb_entity wandb_run_id wandb_watch wandb_log_model wandb_mode wandb_name mlflow_tracking_uri "
    "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts project_name": (
        "set an environment variable of the tracker instead, such as WANDB_ENTITY, WANDB_NAME or MLFLOW_TRACKING_URI"
    ),
    "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode "
    "comet_online comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port "
    "use_trackio trackio_project_name trackio_run_name trackio_space_id use_swanlab swanlab_project "
    "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_log_model "
    "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer": TRACKER,
    "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
    "gradio_temperature": "chatmill does not include Gradio; use `chatmill chat` to try the model",
    "trl vllm rl_beta dpo_beta dpo_use_weighting dpo_label_smoothing dpo_loss_type dpo_loss_weights "
    "dpo_padding_free dpo_use_liger_kernel precompute_ref_log_probs orpo_alpha simpo_gamma cpo_alpha "
    "kto_desirable_weight kto_undesirable_weight center_rewards_coefficient num_labels ebft rpo_alpha "
    "dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss": PREFERENCE,
    "auto_resume_from_checkpoints": "add --resume auto to the train command",
    "resume_from_checkpoint": ("chatmill cannot resume Axolotl checkpoints; the run starts from the base model"),
    "streaming": "chatmill prepares the dataset before the run; the result is the same",
    "default_system_message": "chatmill does not add a system message, but the chat template may add one",
    "eot_tokens": "chatmill finds the end of a turn in the chat template",
    "llmcompressor": "chatmill does not apply sparsity recipes; the loss will differ",
    "torch_dtype bfloat16 float16 float32": (
        "chatmill trains float32 weights; with adamw8bit and adamw_bf16, it trains bfloat16 weights"
    ),
    "reinit_weights": "chatmill uses the weights in the model folder; the loss will differ",
    "processor_kwargs": "chatmill trains only on text, not on images or audio",
    "full_finetune test_value": "Axolotl also ignores this key",
}
NOTES = {name: note for names, note in _GROUPS.items() for name in names.split()}
