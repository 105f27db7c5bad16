"""Hot loops: each a plain torch reference with a fast twin beside it."""
