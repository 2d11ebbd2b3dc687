"""looplab: an autonomous laboratory for machine-learning training.

Importing this package is nearly free: trainers import `looplab.trainkit` inside their own process.
"""

__version__ = "0.1.0"
