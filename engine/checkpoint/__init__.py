"""From a folder's files to a model, or to a reason why not."""
