"""What LMCache's settings become: `hiradix config migrate`."""
