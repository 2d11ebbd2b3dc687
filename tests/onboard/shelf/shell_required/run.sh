#!/bin/sh
python train.py \
    --lr 0.2 \
    --epochs 3 \
    --dropout 0.1 \
    --seed 4
