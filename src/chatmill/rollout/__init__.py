"""Train a model on its own answers, completed with the true objects that the answers lack.

    build_target, Target, PartWeights             a training row from a rollout: its kept prefix and the missed objects
    build_answer                                  a training row with the true answer
    serialize_append                              the text that appends missed objects to a prefix
    scan_rollout, Scan                            find the entries of an answer
    Detection, Fields, Schema                     parse, check and write the entries of an answer
    match_objects, match_equal, Matching          match predicted objects to true ones
    score_objects, DetectionScore                 recall, precision and F1 of answers
    open_task, Task, task_prompts, prompt_lists   open a task and render the prompts of its records
    target_rows, answer_rows, Health              build rows for many records, and count problems of rollouts
    read_truth, read_rollouts, GroundTruth        read files of ground-truth records and of rollouts
    build_target_dataset, build_answer_dataset    build datasets of targets or of true answers
    RolloutConfig, train_rollouts, RolloutResult  the training loop
    RolloutLoss, TermWeights, Axis                the loss on rollout targets
    Generator, CompletionServer, TextServer       generate answers with the model itself or with a server
    COORDINATES                                   the coordinate tokens <|coord_0|> to <|coord_999|>

Names are imported lazily, so that targets and datasets can be built without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.rollout.append import serialize_append as serialize_append
    from chatmill.rollout.config import RolloutConfig as RolloutConfig
    from chatmill.rollout.dataset import build_answer_dataset as build_answer_dataset
    from chatmill.rollout.dataset import build_target_dataset as build_target_dataset
    from chatmill.rollout.files import GroundTruth as GroundTruth
    from chatmill.rollout.files import Rollout as Rollout
    from chatmill.rollout.files import read_rollouts as read_rollouts
    from chatmill.rollout.files import read_truth as read_truth
    from chatmill.rollout.generators import CompletionServer as CompletionServer
    from chatmill.rollout.generators import Generator as Generator
    from chatmill.rollout.generators import TextServer as TextServer
    from chatmill.rollout.loop import RolloutResult as RolloutResult
    from chatmill.rollout.loop import train_rollouts as train_rollouts
    from chatmill.rollout.loss import Axis as Axis
    from chatmill.rollout.loss import RolloutLoss as RolloutLoss
    from chatmill.rollout.loss import TermWeights as TermWeights
    from chatmill.rollout.match import DetectionScore as DetectionScore
    from chatmill.rollout.match import Matching as Matching
    from chatmill.rollout.match import match_equal as match_equal
    from chatmill.rollout.match import match_objects as match_objects
    from chatmill.rollout.match import score_objects as score_objects
    from chatmill.rollout.scan import Scan as Scan
    from chatmill.rollout.scan import scan_rollout as scan_rollout
    from chatmill.rollout.schema import Detection as Detection
    from chatmill.rollout.schema import Fields as Fields
    from chatmill.rollout.schema import Schema as Schema
    from chatmill.rollout.target import Target as Target
    from chatmill.rollout.target import build_answer as build_answer
    from chatmill.rollout.target import build_target as build_target
    from chatmill.rollout.task import Health as Health
    from chatmill.rollout.task import Task as Task
    from chatmill.rollout.task import answer_rows as answer_rows
    from chatmill.rollout.task import open_task as open_task
    from chatmill.rollout.task import prompt_lists as prompt_lists
    from chatmill.rollout.task import target_rows as target_rows
    from chatmill.rollout.task import task_prompts as task_prompts
    from chatmill.rollout.trained_parts import PartWeights as PartWeights
    from chatmill.rollout.vocabulary import COORDINATES as COORDINATES

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
