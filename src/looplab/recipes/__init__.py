"""Complete labs to start from: a trainer, its configs and a lab.yaml in each folder, to be copied and changed."""
