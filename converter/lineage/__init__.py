"""Where a converter's rows come from, in a form that outlives the process, and the way back to the same rows.

A `Recipe` is written down while a converter is made and views are taken of it; it is plain JSON, without a secret.
`remake` checks each value of such JSON, calls the same functions again, and compares fingerprints: other rows than
those that were written down are an error. What another program keeps a recipe in is a module of its own, here MLflow.
"""
