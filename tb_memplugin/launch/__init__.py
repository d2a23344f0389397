"""Record a program that was not changed for it: `tb-memplugin run`, and the variable TB_MEMPLUGIN."""
