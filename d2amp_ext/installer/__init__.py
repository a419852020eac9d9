"""How `d2amp setup` works: it finds torch and Detectron2 or installs them. Standard library only."""
