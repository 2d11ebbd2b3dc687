python run_classification.py \
  --output_dir ./out \
  --do_train --do_eval \
  --num_train_epochs 4 \
  --learning_rate 1e-3 \
  --per_device_train_batch_size 32 \
  --logging_steps 20 \
  --report_to none
