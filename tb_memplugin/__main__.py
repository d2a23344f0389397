"""`python -m tb_memplugin` is `tb-memplugin`."""

from tb_memplugin.commands import main

if __name__ == "__main__":
    main(prog_name="tb-memplugin")
