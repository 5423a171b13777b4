"""Notes on LLaMA-Factory keys that have no counterpart in chatmill."""

from __future__ import annotations

from chatmill.integrations.configs.axolotl_notes import ATTENTION, KERNEL, NO_CODE, PREFERENCE, TRACKER
from chatmill.integrations.configs.hf_arguments import NOTES as HF_NOTES

OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")
OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
_GROUPS: dict[str, str] = {
    "flash_attn shift_attn": ATTENTION,
    "trust_remote_code": NO_CODE,
    "cache_dir use_fast_tokenizer low_cpu_mem_usage use_unsloth use_unsloth_gc enable_liger_kernel "
    "use_reentrant_gc upcast_layernorm upcast_lmhead_output infer_backend offload_folder use_kv_cache "
    "use_v1_kernels infer_dtype print_param_status streaming buffer_size overwrite_cache "
    "preprocessing_batch_size preprocessing_num_workers tokenized_path data_shared_file_system "
    "quantization_device_map fp8_backend fp8_enable_fsdp_float8_all_gather ray_num_workers "
    "ray_init_kwargs ray_run_name ray_storage_path resources_per_worker placement_strategy master_addr "
    "master_port enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
    "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
    "profiler_with_stack profile_modules include_effective_tokens_per_second compute_accuracy media_dir": KERNEL,
    "plot_loss": "chatmill always writes loss.svg",
    "hf_hub_token ms_hub_token om_hub_token": ("chatmill uses HF_TOKEN, or the token that `hf auth login` saved"),
    "adapter_name_or_path adapter_folder create_new_adapter": (
        "chatmill trains new adapters; merge existing adapters into the model first"
    ),
    "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens": (
        "chatmill neither adds tokens nor resizes embeddings; add tokens to the model folder first"
    ),
    "split_special_tokens": "chatmill always encodes special tokens in messages as ordinary text",
    "rope_scaling": "chatmill uses config.json in the model folder unchanged; edit that file",
    "moe_aux_loss_coef": "chatmill does not use an auxiliary loss to balance experts; the loss will differ",
    "train_from_scratch": "chatmill uses the weights in the model folder; the loss will differ",
    "quantization_method": "chatmill quantizes to NF4 with bitsandbytes, and rejects quantized models",
    "quantization_type double_quantization": "chatmill uses NF4 with double quantization for 4-bit weights",
    "additional_target": "chatmill trains only the adapters, not these modules; the loss will differ",
    "loraplus_lr_ratio loraplus_lr_embedding": (
        "both matrices of an adapter have the same learning rate; the loss will differ"
    ),
    "use_dora pissa_init pissa_iter pissa_convert": (
        "chatmill trains plain LoRA with the usual initial weights; the loss will differ"
    ),
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout oft_rank "
    "oft_block_size oft_target freeze_vision_tower freeze_multi_modal_projector freeze_language_model": (
        "this option is for another tuning method and has no effect"
    ),
    "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise "
    "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
    "apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode "
    "badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose": (
        "this option is for another optimizer and has no effect"
    ),
    "asft_alpha eaft_alpha": "chatmill uses plain cross entropy; the loss will differ",
    "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight "
    "kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
    "ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
    "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha": PREFERENCE,
    "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key "
    "swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret": TRACKER,
    "ignore_pad_token_for_loss": "chatmill never trains on padding",
    "eval_on_each_dataset": "chatmill always evaluates each source of val separately",
    "eval_num_beams predict_with_generate do_sample temperature top_p top_k num_beams max_length "
    "max_new_tokens repetition_penalty length_penalty skip_special_tokens": (
        "evaluations use greedy decoding; use `chatmill chat` to sample"
    ),
    "tool_format": "the chat template renders tools",
    "default_system": "chatmill does not add a system message, but the chat template may add one",
    "preserve_thinking": "the chat template determines which reasoning is rendered; see unroll",
    "use_llama_pro mixture_of_depths use_mca use_megatron_bridge use_hyper_parallel use_kt "
    "hyper_parallel_args hyper_parallel_cp_size kt_cpu_activation kt_weight_path "
    "kt_non_expert_weight_path kt_config": "off",
    " ".join((*OTHER_OPTIMIZERS, *OTHER_LOSSES)): "off",
}
NOTES = HF_NOTES | {name: note for names, note in _GROUPS.items() for name in names.split()}
OFF = {"quantization_method": "bnb", "quantization_type": "nf4", "double_quantization": True}
