"""The room of what `install` changes in Detectron2, so that unedited code uses this package."""
