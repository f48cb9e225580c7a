"""Files that hold a whole model and are not transformers' folders, and how they become its objects."""
