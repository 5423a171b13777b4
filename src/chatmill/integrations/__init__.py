"""Use chatmill's data in other trainers, and convert their configs for chatmill.

    hf           transformers.Trainer
    trl          TRL's SFTTrainer
    accelerate   loops that use Accelerate
    lightning    a LightningDataModule
    torchdata    StatefulDataLoader
    torchtitan   its dataloader protocol

Import the module named after your library. The library itself must be installed.
"""
