//! The kernel that runs Linux programs.
#![no_std]
#![no_main]

faultless_bare::kernel!(faultless_personality::Linux);
