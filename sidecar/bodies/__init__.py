"""Looking into request bodies, and changing them without writing them anew."""
