//! The kernel that runs Linux's programs, linked.
#![no_std]
#![no_main]

faultless_bare::kernel!(faultless_personality::Linux);
