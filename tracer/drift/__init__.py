"""How far two checkpoints of one architecture are from each other, depth by depth."""
