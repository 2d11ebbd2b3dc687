# Copyright 2021 The Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0.
"""Softmax regression with random features and momentum (numpy)."""

import json
import os

from absl import app
from absl import flags
from absl import logging
import numpy as np
from sklearn import datasets

FLAGS = flags.FLAGS

flags.DEFINE_string('workdir', '/tmp/rff_workdir', 'Directory to store model data.')
flags.DEFINE_float('learning_rate', 0.5, 'The learning rate for the momentum optimizer.', lower_bound=0.0)
flags.DEFINE_float('momentum', 0.9, 'The decay rate used for the momentum optimizer.')
flags.DEFINE_float('l2', 1e-4, 'Weight decay.')
flags.DEFINE_integer('batch_size', 128, 'The batch size for training.')
flags.DEFINE_integer('num_epochs', 10, 'Number of training epochs.')
flags.DEFINE_integer('num_features', 300, 'Number of random Fourier features.')
flags.DEFINE_float('bandwidth', 2.0, 'Bandwidth of the RBF kernel.')
flags.DEFINE_enum('schedule', 'cosine', ['constant', 'cosine', 'linear'], 'Learning rate schedule.')
flags.DEFINE_bool('nesterov', False, 'Whether to use Nesterov momentum.')
flags.DEFINE_integer('rng_seed', 0, 'Seed of the random features and of the shuffling.')


def get_datasets():
  d = datasets.load_digits()
  x, y = d.data / 16., d.target
  perm = np.random.RandomState(0).permutation(len(x))
  x, y = x[perm], y[perm]
  return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def softmax(z):
  z = np.exp(z - z.max(axis=1, keepdims=True))
  return z / z.sum(axis=1, keepdims=True)


def lr_at(step, total):
  t = step / total
  if FLAGS.schedule == 'cosine':
    return FLAGS.learning_rate * 0.5 * (1 + np.cos(np.pi * t))
  if FLAGS.schedule == 'linear':
    return FLAGS.learning_rate * (1 - t)
  return FLAGS.learning_rate


def evaluate(w, x, y):
  p = softmax(x @ w)
  return -np.log(p[np.arange(len(y)), y] + 1e-12).mean(), (p.argmax(1) == y).mean()


def train_and_evaluate(workdir):
  rng = np.random.RandomState(FLAGS.rng_seed)
  (x, y), (x_test, y_test) = get_datasets()
  proj = rng.randn(x.shape[1], FLAGS.num_features) / FLAGS.bandwidth
  phase = rng.uniform(0, 2 * np.pi, FLAGS.num_features)
  feats = lambda a: np.sqrt(2. / FLAGS.num_features) * np.cos(a @ proj + phase)
  x, x_test = feats(x), feats(x_test)
  w = np.zeros((FLAGS.num_features, 10))
  v = np.zeros_like(w)
  steps_per_epoch = len(x) // FLAGS.batch_size
  total, step, history = FLAGS.num_epochs * steps_per_epoch, 0, []
  for epoch in range(1, FLAGS.num_epochs + 1):
    perms = rng.permutation(len(x))[:steps_per_epoch * FLAGS.batch_size].reshape(steps_per_epoch, -1)
    losses = []
    for idx in perms:
      p = softmax(x[idx] @ w)
      losses.append(-np.log(p[np.arange(len(idx)), y[idx]] + 1e-12).mean())
      p[np.arange(len(idx)), y[idx]] -= 1
      g = x[idx].T @ p / len(idx) + FLAGS.l2 * w
      lr = lr_at(step, total) * 10
      v = FLAGS.momentum * v - lr * g
      w = w + (FLAGS.momentum * v - lr * g if FLAGS.nesterov else v)
      step += 1
    test_loss, test_acc = evaluate(w, x_test, y_test)
    logging.info('epoch:% 3d, train_loss: %.4f, test_loss: %.4f, test_accuracy: %.2f',
                 epoch, np.mean(losses), test_loss, test_acc * 100)
    history.append(dict(epoch=epoch, test_loss=float(test_loss), test_accuracy=float(test_acc)))
  os.makedirs(workdir, exist_ok=True)
  with open(os.path.join(workdir, 'history.json'), 'w') as f:
    json.dump(history, f)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError('Too many command-line arguments.')
  train_and_evaluate(FLAGS.workdir)


if __name__ == '__main__':
  app.run(main)
