"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, or your own.

    interface     Tracker, the five methods of a tracker; TrackedRun and SampleAnswer, its arguments
    reporter      Reporter: a thread for each tracker, so that no tracker delays or ends the run
    pages         the report pages about the data

Each tracker client has its own module, which imports the client only when a run uses it.
"""
