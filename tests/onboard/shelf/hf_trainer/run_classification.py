#!/usr/bin/env python
# coding=utf-8
# Licensed under the Apache License, Version 2.0 (the "License");
"""Training a tiny BERT from scratch for sequence classification with the Trainer."""

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Arguments pertaining to which model/config we are going to train."""

    hidden_size: int = field(default=32, metadata={"help": "Hidden size of the encoder."})
    num_hidden_layers: int = field(default=1)
    num_attention_heads: int = field(default=2)
    hidden_dropout_prob: float = field(default=0.1, metadata={"help": "Dropout of the encoder."})
    model_name_or_path: Optional[str] = field(default=None, metadata={"help": "Path to a pretrained checkpoint."})


@dataclass
class DataTrainingArguments:
    """Arguments pertaining to what data we are going to input our model for training and eval."""

    max_seq_length: int = field(default=16)
    vocab_size: int = field(default=40)
    max_train_samples: Optional[int] = field(default=1500, metadata={"help": "Truncate the number of train examples."})
    max_eval_samples: Optional[int] = field(default=400)


class MajorityTokens(Dataset):
    """Label 1 if a sequence holds more tokens of the upper half of the vocabulary than of the lower."""

    def __init__(self, n, length, vocab, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, vocab, (n, length), generator=g)
        upper = (self.ids > (vocab + 3) // 2).float().mean(1)
        self.labels = (upper > 0.5).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


def compute_metrics(p):
    preds = np.argmax(p.predictions, axis=1)
    return {"accuracy": float((preds == p.label_ids).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        # If we pass only one argument to the script and it's the path to a json file, let's parse it to get our args.
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    transformers.utils.logging.set_verbosity_warning()
    logger.info("Training/evaluation parameters lr=%s epochs=%s", training_args.learning_rate, training_args.num_train_epochs)
    set_seed(training_args.seed)

    config = BertConfig(
        vocab_size=data_args.vocab_size,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=model_args.num_attention_heads,
        intermediate_size=2 * model_args.hidden_size,
        hidden_dropout_prob=model_args.hidden_dropout_prob,
        max_position_embeddings=data_args.max_seq_length,
        num_labels=2,
    )
    if model_args.model_name_or_path:
        model = BertForSequenceClassification.from_pretrained(model_args.model_name_or_path)
    else:
        model = BertForSequenceClassification(config)

    train_dataset = MajorityTokens(data_args.max_train_samples, data_args.max_seq_length, data_args.vocab_size, seed=1)
    eval_dataset = MajorityTokens(data_args.max_eval_samples, data_args.max_seq_length, data_args.vocab_size, seed=2)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
