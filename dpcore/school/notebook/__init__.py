"""``%load_ext dpcore`` and ``%%ranks 4``: ranks that live on between the cells of a notebook."""
