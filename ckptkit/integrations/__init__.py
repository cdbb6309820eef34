"""ckptkit inside other frameworks; each module imports its framework when it is used."""
