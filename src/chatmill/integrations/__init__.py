"""Use chatmill's data in other trainers, and convert the configs of other trainers for chatmill.

    hf           transformers.Trainer
    trl          TRL's SFTTrainer
    accelerate   loops that use Accelerate
    lightning    a LightningDataModule
    torchdata    StatefulDataLoader
    torchtitan   its dataloader protocol

Import the module named after your library; the library itself must be installed. `transformers.Trainer` and TRL read
the dataset `TrainRows`; the other libraries read batches from an `EpisodeLoader`.
"""
