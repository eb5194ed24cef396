"""What hfpatch serves of every model type of transformers and diffusers: `hfpatch coverage`."""
