"""Cheap first where evidence says that it is good enough, checked, and the dearer route next."""
