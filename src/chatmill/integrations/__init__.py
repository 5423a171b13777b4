"""Use chatmill's data in other trainers, and convert their configs for chatmill.

    hf           transformers.Trainer
    trl          TRL's SFTTrainer
    accelerate   loops that use Accelerate
    lightning    a LightningDataModule
    torchdata    StatefulDataLoader
    torchtitan   its dataloader protocol

Import the module that you need; each needs its library. `TrainRows` is the dataset that Trainer and TRL read;
the others read batches of an `EpisodeLoader`.
"""
