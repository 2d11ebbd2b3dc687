"""The tiny model of our own: the tasks it is made for and how it is trained."""
