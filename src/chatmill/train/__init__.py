"""Training: models, losses, the training loop and checkpoints.

    TrainConfig, train_model, TrainResult         the configuration, training and result of a run
    GPT, GPTSizes, CausalModel, MODEL_FAMILIES    chatmill's own model; the model interface, and all model families
    LossFunction, weighted_loss, Losses, LMHead   the loss interface, and the default cross entropy
    Inputs, TrainedPositions, by_segment          a batch on the model's device; the loss of each conversation
    open_model, model_folder                      load a model from its folder, a checkpoint or a run
    merge_adapters                                merge LoRA adapters into their base model
    generate, generate_steps, beam_search         generate answers; Sampling sets how tokens are chosen
    score_model, read_metrics, read_rows          a model's loss and answers on a dataset; the logs of a run
    open_chat_model, ChatModel, ChatSession       chat with a trained model
    Tracker, TrackedRun, SampleAnswer             the interface for experiment trackers, and its arguments

This package needs only numpy, torch and safetensors, plus transformers for Hugging Face models and peft for adapters.
Only `chat_model` also imports the packages that render text. Public names are imported lazily, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.train.chat_model import ChatModel as ChatModel
    from chatmill.train.chat_model import ChatSession as ChatSession
    from chatmill.train.chat_model import open_chat_model as open_chat_model
    from chatmill.train.checkpoint_files import model_folder as model_folder
    from chatmill.train.config import GPTSizes as GPTSizes
    from chatmill.train.config import TrainConfig as TrainConfig
    from chatmill.train.generation import Sampling as Sampling
    from chatmill.train.generation import beam_search as beam_search
    from chatmill.train.generation import generate as generate
    from chatmill.train.generation import generate_steps as generate_steps
    from chatmill.train.gpt import GPT as GPT
    from chatmill.train.load_model import MODEL_FAMILIES as MODEL_FAMILIES
    from chatmill.train.load_model import open_model as open_model
    from chatmill.train.loop import train_model as train_model
    from chatmill.train.loss import LMHead as LMHead
    from chatmill.train.loss import Losses as Losses
    from chatmill.train.loss import LossFunction as LossFunction
    from chatmill.train.loss import TrainedPositions as TrainedPositions
    from chatmill.train.loss import by_segment as by_segment
    from chatmill.train.loss import weighted_loss as weighted_loss
    from chatmill.train.merge import merge_adapters as merge_adapters
    from chatmill.train.model import CausalModel as CausalModel
    from chatmill.train.model import Inputs as Inputs
    from chatmill.train.result import TrainResult as TrainResult
    from chatmill.train.run_dir import read_metrics as read_metrics
    from chatmill.train.run_dir import read_rows as read_rows
    from chatmill.train.score import score_model as score_model
    from chatmill.train.trackers.interface import SampleAnswer as SampleAnswer
    from chatmill.train.trackers.interface import TrackedRun as TrackedRun
    from chatmill.train.trackers.interface import Tracker as Tracker

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
