"""Bugs planted in chatmill on purpose, each with the trial that must detect it.

Each bug is planted by patching the library in a separate process. With a planted bug, its trial must report that
a result is lost or silently wrong. Each module of this package contains the bugs of one area.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fault_injection.planted import disk, inputs, remote, runs, show, store
from fault_injection.trial import Trial
from fault_injection.trials import (
    audit_kills,
    cache_kills,
    changed_data,
    changed_input,
    checkpoint_crashes,
    clock,
    crashes,
    damage,
    damage_of_runs,
    failing_calls,
    full_disk,
    hostile_checkpoints,
    hostile_metadata,
    hostile_models,
    identity,
    large_store,
    object_store,
    outputs,
    overwrite,
    ranks,
    ray_workers,
    readers,
    templates,
    tokenizer_differences,
    tokenizer_files,
    two_builders,
    viewer,
    write_points,
)


@dataclass(frozen=True)
class Planted:
    name: str
    plant: Callable[[], None]
    trial: Trial
    size: int


PLANTED = (
    Planted("files not synced", disk.files_are_not_synced, crashes.TRIAL, 6),
    Planted("folders not synced", disk.folders_are_not_synced, crashes.TRIAL, 6),
    Planted("parent folder not synced after the rename", disk.the_name_is_not_synced, crashes.TRIAL, 6),
    Planted("metadata not written last", disk.metadata_first, crashes.TRIAL, 6),
    Planted("old dataset removed before the new one is published", disk.old_dataset_removed_first, crashes.TRIAL, 6),
    Planted("checkpoints not synced", disk.nothing_is_synced, checkpoint_crashes.TRIAL, 1),
    Planted("build folder renamed too early", disk.renamed_early, write_points.BUILDS, 30),
    Planted("trained span dropped when a build is resumed", store.span_dropped, write_points.BUILDS, 4),
    Planted("trained span dropped before it is stored", store.span_dropped_on_the_way, large_store.TRIAL, 24),
    Planted("ENOSPC ignored", disk.full_disk_swallowed, full_disk.BUILDS, 4),
    Planted("failed write ignored, prepare", disk.full_disk_swallowed, failing_calls.WRITES_OF_BUILDS, 4),
    Planted("failed write ignored, training", disk.full_disk_swallowed, failing_calls.WRITES_OF_RUNS, 3),
    Planted("file name missing from operating system errors", disk.files_not_named, failing_calls.READS_OF_BUILDS, 4),
    Planted("unlisted files of a replaced folder removed", disk.everything_is_replaced, overwrite.TRIAL, 2),
    Planted("metadata not written last, object store", remote.remote_metadata_first, object_store.TRIAL, 12),
    Planted("metadata published before all uploads end", remote.uploads_not_awaited, object_store.TRIAL, 12),
    Planted("metadata written without its condition", remote.condition_dropped, object_store.TRIAL, 12),
    Planted("objects in use deleted by clean", remote.clean_without_metadata, object_store.TRIAL, 12),
    Planted("cache downloads not locked", remote.cache_not_locked, cache_kills.TRIAL, 6),
    Planted("hashes of downloaded objects not checked", remote.fetched_hashes_believed, object_store.DAMAGED, 20),
    Planted("hashes of objects not checked by verify", remote.objects_not_hashed, object_store.DAMAGED, 20),
    Planted("build not locked", disk.nobody_locks, two_builders.TRIAL, 2),
    Planted("ids not checked against the vocabulary", store.ids_not_checked, tokenizer_files.LIARS, 4),
    Planted("staged units not checked", store.crc_not_checked, damage_of_runs.STAGED, 12),
    Planted("hashes not checked", store.hashes_not_checked, damage.FLIPS, 60),
    Planted("hashes not checked, swapped files", store.hashes_not_checked, damage.SWAPS, 24),
    Planted("sizes not checked", store.sizes_not_checked, damage.CUTS, 1),
    Planted("sizes not checked, missing files", store.sizes_not_checked, damage.MISSING, 1),
    Planted("metadata not validated", store.metadata_believed, hostile_metadata.TRIAL, 20),
    Planted("invalid bytes accepted by a reader", inputs.bad_bytes_accepted, readers.TRIAL, 300),
    Planted("record errors not reported", inputs.faults_forgotten, readers.TRIAL, 300),
    Planted("changed input not detected", inputs.input_known_by_size, changed_input.TRIAL, 45),
    Planted("template sandbox disabled", inputs.sandbox_open, templates.TRIAL, 16),
    Planted("template process not locked down", inputs.template_process_not_locked, templates.ESCAPED, 3),
    Planted("environment passed to the template process", inputs.environment_kept, templates.ESCAPED, 1),
    Planted("panics of the tokenizers library not caught", inputs.panics_not_caught, tokenizer_files.MUTANTS, 50),
    Planted("replaced folders not detected", store.folders_are_not_compared, identity.EXCHANGED, 40),
    Planted("bus errors not handled", store.bus_errors_are_not_handled, identity.CUT, 12),
    Planted("truncated files not detected", store.cut_files_are_not_noticed, identity.CUT, 24),
    Planted("chatmill's own files overlooked in a partial copy", store.traces_are_overlooked, identity.PARTIAL, 60),
    Planted("file descriptors kept open by memory maps", store.maps_hold_descriptors, identity.DESCRIPTORS, 24),
    Planted("fastokens used without a comparison", inputs.fastokens_believed, tokenizer_differences.TRIAL, 1_200),
    Planted("whole files read into memory", store.whole_files_read, large_store.TRIAL, 24),
    Planted("current time written to the dataset", store.bytes_depend_on_the_clock, clock.BUILDS, 2),
    Planted("checkpoint hashes not checked", runs.checkpoint_hash_not_checked, damage_of_runs.CHECKPOINTS, 12),
    Planted("hash chain of the audit log not checked", runs.chain_not_checked, damage_of_runs.AUDIT_LOGS, 40),
    Planted("units of lost workers not run again", store.units_of_lost_workers_not_run_again, ray_workers.TRIAL, 1),
    Planted("loss of a rank not reported", runs.losses_of_ranks_not_reported, ranks.TRIAL, 1),
    Planted("state saved before its line is in the audit log", runs.state_saved_before_the_log, audit_kills.TRIAL, 3),
    Planted("control characters in names not escaped", show.names_printed_as_they_are, outputs.TRIAL, 12),
    Planted("closed pipe reported as an error", show.closed_pipe_is_an_error, outputs.TRIAL, 24),
    Planted("write error on standard output ignored", show.full_output_swallowed, outputs.TRIAL, 40),
    Planted("half-open connections not closed", show.half_open_connections_kept, viewer.TRIAL, 10),
    Planted("number of connections not limited", show.any_number_of_connections, viewer.TRIAL, 10),
    Planted("digits of a number in a path not limited", show.any_number_of_digits, viewer.TRIAL, 250),
    Planted("unlisted state files read from a checkpoint", runs.unlisted_state_read, hostile_checkpoints.TRIAL, 1),
    Planted("checkpoint cursor not compared with the audit log", runs.cursor_believed, hostile_checkpoints.TRIAL, 2),
    Planted("pickled weights loaded", runs.pickles_loaded, hostile_models.TRIAL, 1),
    Planted("dataset not hashed during a run", runs.data_not_hashed_again, changed_data.TRIAL, 2),
    Planted("batch ids not checked against the vocabulary", runs.ids_of_batches_believed, changed_data.TRIAL, 3),
)
