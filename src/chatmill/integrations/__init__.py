"""Use chatmill's data in other trainers, and convert their configs for chatmill.

    hf           transformers.Trainer
    trl          TRL's SFTTrainer
    accelerate   loops that use Accelerate
    lightning    a LightningDataModule
    torchdata    StatefulDataLoader
    torchtitan   its dataloader protocol

Import the module for your library, which must be installed. Trainer and TRL read the dataset `TrainRows`; the other
libraries read batches from an `EpisodeLoader`.
"""
