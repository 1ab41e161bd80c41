"""Hints of refusals shared by several modules: what to do about artifacts that contradict each other, or themselves."""

SAVE_AGAIN = "save the checkpoint again, with CheckpointState.save_checkpoint of onnxruntime.training"
TOGETHER = "put files of one call of onnxruntime.training.artifacts.generate_artifacts into the folder"
EXPORT_AGAIN = "export the forward, and generate the artifacts from it, again"
