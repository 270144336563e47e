"""`python -m tracer`, which launchers need: `torchrun --nproc-per-node 2 -m tracer cpt recipe.yaml`."""

from tracer.cli import main

main()
